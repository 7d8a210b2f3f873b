"""Post-train a GPT: `python -m mindspeed_ms.launch -n 2 posttrain_gpt.py --stage sft ...`; docs/post-training.md."""

from mindspeed_ms.core.logging import setup_logging
from mindspeed_ms.tasks.posttrain.launcher import AutoTrainer
from mindspeed_ms.training.user_errors import in_one_line


def launch():
    """Train the stage that the command line names."""
    trainer = AutoTrainer()
    trainer.train()


if __name__ == "__main__":
    setup_logging()
    with in_one_line():
        launch()
