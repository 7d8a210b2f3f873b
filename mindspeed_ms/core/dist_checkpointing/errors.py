"""Exceptions of checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found or read; the message names the file and the reason."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is there, but not whole: files or bytes are missing or wrong."""
