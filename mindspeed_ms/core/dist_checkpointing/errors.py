"""Exceptions of checkpoints."""


class CheckpointError(RuntimeError):
    """Checkpoint that cannot be written, found or read; the message names the file and the reason."""


class DamagedCheckpointError(CheckpointError):
    """Incomplete or damaged checkpoint: files or bytes are missing or wrong."""
