"""Generate and chat with a trained model, with MindSpeed-LLM's flags: `python inference.py --help`, docs/inference.md."""

from mindspeed_ms.tools.generate.__main__ import exit_with, main
from mindspeed_ms.tools.generate.mindspeed_llm import job_of

if __name__ == "__main__":
    exit_with(lambda: main(job_of=job_of, program="inference.py", script=__file__))
