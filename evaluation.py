"""Evaluate a trained model: perplexity, multiple choice, GSM8K. `python evaluation.py --help`, docs/evaluation.md."""

from mindspeed_ms.tools.evaluate import command
from mindspeed_ms.tools.model_command.main import exit_with, main

if __name__ == "__main__":
    exit_with(lambda: main(None, command.job_of, command.PROGRAM, __file__, "mindspeed_ms.tools.evaluate.run"))
