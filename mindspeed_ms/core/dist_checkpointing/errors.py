"""The one error of checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found or read; the message names the file and the reason."""
