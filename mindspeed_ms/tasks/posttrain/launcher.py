"""AutoTrainer: the trainer of the stage that the command line names. Source of names: MindSpeed-LLM."""

from mindspeed_ms.tasks.posttrain.stages import register_trainer, trainer_class
from mindspeed_ms.training import get_all_config, get_args, initialize_megatron

__all__ = ["AutoTrainer", "get_trainer", "register_trainer"]


def get_trainer(stage):
    """Build the trainer of a stage (BaseTrainer).

    Raises:
        StageError: no such stage.
    """
    return trainer_class(stage)()


class AutoTrainer:
    """Trainer of the stage of the command line.

    Args:
        extra_args_provider, args_defaults: see `initialize_megatron`.

    Attributes:
        args (argparse.Namespace): the command line.
        trainer (BaseTrainer): of the stage.
    """

    def __init__(self, extra_args_provider=None, args_defaults=None):
        initialize_megatron(extra_args_provider, args_defaults)
        self.args = get_args()
        self.trainer = get_trainer(get_all_config().training_config.stage)

    def train(self):
        """Train; returns the `training.Trainer` with model and counters."""
        return self.trainer.train()
