"""Words of timeout errors of collectives: what the ranks wait for while one of them works alone, and the option to raise."""

from contextlib import contextmanager

LONGER = (
    "To wait longer raise --distributed-timeout-minutes (parallel_config.distributed_timeout_minutes), or "
    "MINDSPEED_MS_COMM_TIMEOUT where no configuration gives it"
)
_works = []


@contextmanager
def waiting_for(work):
    """Context manager: inside, this rank's calls wait for `work`, "rank 0, which prepares the data"."""
    _works.append(work)
    try:
        yield
    finally:
        _works.pop()


def waits_for():
    """Sentence that names what is waited for; "" if nothing was said."""
    return f" The call waits for {_works[-1]}." if _works else ""
