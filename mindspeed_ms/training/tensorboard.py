"""TensorBoard event files of a training, and the writer of this process (`get_tensorboard_writer`)."""

from importlib.util import find_spec

from mindspeed_ms.core import comm
from mindspeed_ms.core import num_microbatches_calculator as calculator

_PEAK_MEMORY = "VmHWM:"
_OPTIONS = {  # names that an option of the training_config switches
    "loss_scale": "log_loss_scale_to_tensorboard",
    "learning_rate": "log_learning_rate_to_tensorboard",
    "time_ms": "log_timers_to_tensorboard",
    "batch_size": "log_batch_size_to_tensorboard",
    "peak_memory_bytes": "log_memory_to_tensorboard",
    "valid_perplexity": "log_validation_ppl_to_tensorboard",
    "test_perplexity": "log_validation_ppl_to_tensorboard",
}
_writer = None


class TensorboardError(RuntimeError):
    """Error: no library that can write event files is installed."""


def set_tensorboard_writer(writer):
    """Set the TensorBoard writer of this rank; None: it writes no event files."""
    global _writer
    _writer = writer


def get_tensorboard_writer():
    """TensorBoard writer of this rank, or None."""
    return _writer


class TensorboardEvents:
    """Writer of numbers as TensorBoard events; does nothing without a writer.

    Args:
        settings (Optional[TrainingConfig]): read: tensorboard_dir, tensorboard_log_interval, log_*_to_tensorboard.

    Attributes:
        writer: object with `add_scalar(name, value, step)` and `flush()`, after `open`; or None.
    """

    def __init__(self, settings=None):
        self.writer = None
        self._settings = settings
        self.interval = settings.tensorboard_log_interval if settings is not None else 1
        self._left_out = {name for name, option in _OPTIONS.items() if settings is not None and not getattr(settings, option)}

    def open(self):
        """Take this process's writer; rank 0 makes one if `tensorboard_dir` is set and there is none.

        Raises:
            RuntimeError: no library that can write event files is installed.
        """
        folder = self._settings.tensorboard_dir if self._settings is not None else None
        if folder and comm.get_rank() == 0 and get_tensorboard_writer() is None:
            set_tensorboard_writer(make_tensorboard_writer(folder, self._settings.tensorboard_queue_size))
        self.writer = get_tensorboard_writer()

    @property
    def timers_writer(self):
        """The writer, if timers are written too (`log_timers_to_tensorboard`)."""
        return None if "time_ms" in self._left_out else self.writer

    def write_step(self, values, iteration):
        """Write the numbers of a step (dict[str, float]) if its iteration is due."""
        if self.writer is not None and iteration % self.interval == 0:
            self.write(
                {**values, "batch_size": calculator.get_current_global_batch_size(), "peak_memory_bytes": peak_memory_bytes()},
                iteration,
            )

    def write(self, values, iteration):
        """Write numbers (dict[str, float]); names with `_` get `-`, as TensorBoard's users know them from Megatron."""
        if self.writer is None:
            return
        for name, value in values.items():
            if name not in self._left_out and isinstance(value, (int, float)):
                self.writer.add_scalar(name.replace("_", "-"), value, iteration)

    def flush(self):
        """Flush all events to the disk."""
        if self.writer is not None:
            self.writer.flush()


def peak_memory_bytes():
    """Peak resident memory of this process (host); None where the system does not report it."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            line = next((line for line in file if line.startswith(_PEAK_MEMORY)), None)
    except OSError:
        return None
    return int(line.split()[1]) * 1024 if line else None


def require_tensorboard(settings):
    """Raise an error if `tensorboard_dir` is set and nothing can write event files, before anything is built.

    Raises:
        TensorboardError: with the command that installs it.
    """
    known = (("tensorboardX",), ("torch", "tensorboard"))
    if not settings.tensorboard_dir or get_tensorboard_writer() is not None:
        return
    if not any(all(find_spec(module) for module in modules) for modules in known):
        raise TensorboardError(
            f"tensorboard_dir (--tensorboard-dir) is {settings.tensorboard_dir!r}, but nothing here can write TensorBoard "
            "files: pip install tensorboardX (or 'mindspeed_ms[tensorboard]'), or leave it out (metrics.jsonl has the same "
            "numbers)."
        )


def make_tensorboard_writer(folder, queue_size=1000):
    """Make a TensorBoard writer on rank 0.

    Raises:
        RuntimeError: no library that can write event files is installed.
    """
    for module in ("tensorboardX", "torch.utils.tensorboard"):
        try:
            writer_class = __import__(module, fromlist=["SummaryWriter"]).SummaryWriter
        except ImportError:
            continue
        return writer_class(folder, max_queue=queue_size)
    raise RuntimeError(
        f"tensorboard_dir is {folder!r}, but nothing here can write TensorBoard files: pip install "
        "tensorboardX, or leave tensorboard_dir out (the same numbers are in metrics.jsonl)."
    )
