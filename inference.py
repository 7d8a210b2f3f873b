"""Generate and chat with a trained model, with MindSpeed-LLM's flags: `python inference.py --help`, docs/inference.md."""

from mindspeed_ms.tools.generate.__main__ import RUNNER
from mindspeed_ms.tools.generate.mindspeed_llm import job_of
from mindspeed_ms.tools.model_command.main import exit_with, main

if __name__ == "__main__":
    exit_with(lambda: main(None, job_of, "inference.py", __file__, RUNNER))
