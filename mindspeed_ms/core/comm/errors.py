"""Exceptions of communication; all are subclasses of `CommError`."""


class CommError(RuntimeError):
    """Communication failed; the text names the operation, the group and the ranks."""


class MismatchError(CommError):
    """Members of a group made different calls; the text names both."""


class DeadlockError(MismatchError):
    """Ranks wait for each other in calls that can never complete; the text names every call of the cycle."""


class PeerError(CommError):
    """A rank that this one waits for has ended."""


class PeerDiedError(PeerError):
    """A rank's process ended without leaving."""


class PeerLeftError(PeerError):
    """A rank finished or raised without making the call that this rank waits for."""


class CommTimeoutError(CommError):
    """A call took longer than its group's timeout."""


class SharedMemoryError(CommError):
    """Shared memory is missing or too small, or the ranks do not share a host."""
