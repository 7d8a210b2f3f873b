"""Errors of one rank become the same error on all ranks: nobody waits for a rank that has given up."""
from mindspeed_ms.core import comm
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError


def attempt(function, *arguments):
    """(result, None), or (None, text of the error with this rank's number)."""
    try:
        return function(*arguments), None
    except Exception as error:
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        return None, f"rank {comm.get_rank()}: {kind}{error}"


def agree(doing, outcome):
    """Results of all ranks from each rank's `attempt`.

    Raises:
        CheckpointError: on all ranks, with the errors of those that failed (equal ones once); `doing` starts the message.
    """
    outcomes = comm.world_group().all_gather_object(outcome)
    failures = {}
    for _, text in outcomes:
        if text is not None:
            failures.setdefault(text.partition(": ")[2], text)
    if failures:
        raise CheckpointError(f"{doing}: " + "; ".join(failures.values()))
    return [result for result, _ in outcomes]


def on_all_ranks(doing, function, *arguments):
    """Run on every rank; list of the results by rank. Raises CheckpointError on all ranks if one fails."""
    return agree(doing, attempt(function, *arguments))


def on_rank_zero(doing, function, *arguments):
    """Run on rank 0 only; its result on all ranks. Raises CheckpointError on all ranks if it fails."""
    return on_all_ranks(doing, function if comm.get_rank() == 0 else lambda *_: None, *arguments)[0]
