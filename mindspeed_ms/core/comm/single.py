"""Groups of one rank: nothing is sent, on any device, and no launcher is needed."""

from mindspeed_ms.core.comm.interface import ProcessGroup


class SingleProcessGroup(ProcessGroup):
    """A group with this rank alone. Every collective returns its argument; there is no peer."""

    def barrier(self):
        """Return at once."""

    def all_gather_object(self, value):
        """List `[value]`."""
        return [value]

    def broadcast_object(self, value, source):
        """`value` itself."""
        self.index_of(source, "broadcast_object")
        return value

    def _unreachable(self, *arguments, **keywords):
        raise AssertionError("the interface answers for a group of one")

    _all_reduce = _all_gather = _reduce_scatter = _all_to_all = _broadcast = _isend = _irecv = _unreachable


class SingleJob:
    """Communication of a world of one rank."""

    def __init__(self, environment, timeout):
        self.timeout = timeout

    def new_group(self, name, ranks, timeout):
        """Group of this rank."""
        return SingleProcessGroup(name, ranks, ranks[0])

    def close(self, exception=None):
        """Do nothing."""
