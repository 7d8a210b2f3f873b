"""Agreement on errors: an error of one rank is raised on all ranks, so that none of them waits for a failed one."""

from mindspeed_ms.core import comm
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError


def attempt(function, *arguments):
    """Call a function: (result, None), or (None, text of the error)."""
    try:
        return function(*arguments), None
    except Exception as error:
        kind = "" if isinstance(error, (CheckpointError, OSError)) else f"{type(error).__name__}: "
        return None, f"{kind}{error}"


def agree(doing, outcome):
    """Exchange each rank's `attempt`: results of all ranks.

    Raises:
        CheckpointError: on all ranks, with the errors of those that failed (equal ones once, and without a rank's number if
            all have it); `doing` starts the message.
    """
    outcomes = comm.world_group().all_gather_object(outcome)
    ranks = {}
    for rank, (_, text) in enumerate(outcomes):
        if text is not None:
            ranks.setdefault(text, []).append(rank)
    if ranks:
        texts = [text if len(failed) == len(outcomes) else f"rank {failed[0]}: {text}" for text, failed in ranks.items()]
        raise CheckpointError(f"{doing}: " + "; ".join(texts))
    return [result for result, _ in outcomes]


def on_all_ranks(doing, function, *arguments):
    """Run a function on every rank; list of the results by rank. Raises CheckpointError on all ranks if one fails."""
    return agree(doing, attempt(function, *arguments))


def on_rank_zero(doing, function, *arguments):
    """Run a function on rank 0; its result on all ranks. Raises CheckpointError on all ranks if it fails."""
    result, text = comm.of_rank_zero("reads or writes files of checkpoints", attempt, function, *arguments)
    if text is not None:
        raise CheckpointError(f"{doing}: {text}")
    return result
