"""Registry of the rules, and the Context with which they are called."""

from mindspeed_ms.config.errors import Problem
from mindspeed_ms.config.model_description import describe_parallel
from mindspeed_ms.config.settings import ARGUMENTS, COMMAND_LINE
from mindspeed_ms.layout.ranks import model_parallel_size, world_unit_of

# what only the data parallel wrapper does
_NEEDS_DDP = (
    "overlap_grad_reduce",
    "delay_grad_reduce",
    "check_for_nan_in_grad",
    "bucket_size",
    "average_in_collective",
    "grad_reduce_in_bf16",
    "enable_mem_align",
)
RULES = []
LAST_RULES = []


def rule(function):
    """Register a rule: `function(context)` yields Problems (and may call `context.notice`)."""
    RULES.append(function)
    return function


def last_rule(function):
    """Register a rule that runs only if all others found nothing."""
    LAST_RULES.append(function)
    return function


class Context:
    """The configuration as rules see it.

    Attributes:
        model, training, dataset, optimizer, parallel, moe, lora: the sections; `model` may be None.
        world: number of ranks, None if it is not known.
    """

    def __init__(self, all_config, settings):
        self.all_config = all_config
        self.settings = settings
        self.model = all_config.model_config
        self.training = all_config.training_config
        self.dataset = all_config.dataset_config
        self.optimizer = all_config.optimizer_config
        self.parallel = all_config.parallel_config
        self.moe = all_config.moe_config
        self.lora = all_config.lora_config
        self.world = self.parallel.world_size

    def was_set(self, path):
        """True if the user set the path."""
        return self.settings.was_set(path)

    def was_argument(self, path):
        """True if the path was set by an argument (a flag, or a name of a Namespace), not by a file or a dict."""
        setting = self.settings.by_path.get(path)
        return setting is not None and setting.place in (COMMAND_LINE, ARGUMENTS)

    def value(self, path):
        """The value at a config path."""
        value = self.all_config
        for name in path.split("."):
            value = getattr(value, name) if value is not None else None
        return value

    def problem(self, path, message, *others):
        """A Problem with the value at `path`; `others` are further paths, named behind the message."""
        rest = ", ".join(f"{self.name(other)} = {self.value(other)!r}{self._source(other)}" for other in others)
        return Problem(path, f"{message} ({rest})" if rest else message, self.value(path))

    def name(self, path):
        """A path as the user wrote it, or the path."""
        setting = self.settings.by_path.get(path)
        return setting.key if setting is not None else path

    def _source(self, path):
        """Origin (text) of a further path of a problem."""
        setting = self.settings.by_path.get(path)
        if setting is None:
            return " by default"
        return f" from the {setting.place}" if setting.place == COMMAND_LINE else f" from {setting.place}" * bool(setting.place)

    def notice(self, text):
        """Add a notice: a remark for the user that is no error."""
        if text not in self.all_config.notices:
            self.all_config.notices.append(text)

    @property
    def ddp_switches(self):
        """Fields of training_config that the user set and that only the data parallel wrapper implements."""
        return [name for name in _NEEDS_DDP if self.training[name] and self.was_set(f"training_config.{name}")]

    @property
    def world_unit(self):
        """The number that divides every valid world size."""
        return world_unit_of(describe_parallel(self.all_config))

    @property
    def data_parallel_size(self):
        """world / (tp * pp * cp), None if the world is not known or does not fit."""
        size = model_parallel_size(self.parallel)
        return None if not self.world or self.world % size else self.world // size
