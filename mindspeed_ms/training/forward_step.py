"""Forward step of a model whose construct returns its loss, and the check of a batch against its arguments."""

import inspect
from functools import lru_cache, partial

from mindspeed_ms.core.context_parallel import get_batch_on_this_cp_rank
from mindspeed_ms.core.distributed import unwrap_model
from mindspeed_ms.training.losses import count_tokens, loss_function
from mindspeed_ms.training.timers import get_timers

_DATASET_ID = "dataset_id"


class BatchMismatchError(ValueError):
    """Error: the keys of a batch are not the arguments of the model's construct."""


def forward_step(data_iterator, model):
    """The forward step that `pretrain` uses when it is given none: `model(**micro_batch)`.

    Args:
        data_iterator (Iterator): micro-batches.
        model (ShardedModel): a chunk; with `calculate_per_token_loss` sums over tokens go to the backward.

    Returns:
        (output, loss_func)
    """
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = without_dataset_id(next(data_iterator), unwrap_model(model))
    check_batch(batch, unwrap_model(model))
    batch = cut_batch(batch, unwrap_model(model))
    timer.stop()
    counted = partial(loss_function, count_tokens(batch), model.calculate_per_token_loss, loss_mask=batch.get("loss_mask"))
    return model(**batch), counted


def without_dataset_id(batch, model):
    """Remove `dataset_id` (number of the sample's dataset in a blend) from a batch, unless the model's construct takes it."""
    if _DATASET_ID not in batch or _DATASET_ID in _construct_arguments(type(model))[1]:
        return batch
    return {name: value for name, value in batch.items() if name != _DATASET_ID}


def cut_batch(batch, model):
    """Cut a batch to this rank's part of the sequences, by the model's own rule (`cut_batch`) if it has one."""
    return getattr(model, "cut_batch", get_batch_on_this_cp_rank)(batch)


def check_batch(batch, model):
    """Check a batch's keys against the arguments of the model's construct.

    Raises:
        BatchMismatchError: names the missing and the unknown keys and what construct takes.
    """
    required, known, takes_any = _construct_arguments(type(model))
    missing = [name for name in required if name not in batch]
    unknown = [] if takes_any else [name for name in batch if name not in known]
    if missing or unknown:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has unknown {', '.join(map(str, unknown))}"] if unknown else []
        raise BatchMismatchError(
            f"the batch {' and '.join(parts)}: {type(model).__name__}.construct takes ({', '.join(known)}). Let "
            "get_batch_func return a dict with those names (None for what is not used)."
        )


@lru_cache(maxsize=64)
def _construct_arguments(model_class):
    parameters = list(inspect.signature(model_class.construct).parameters.values())[1:]
    named = [item for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    return (
        tuple(item.name for item in named if item.default is item.empty),
        tuple(item.name for item in named),
        any(item.kind is item.VAR_KEYWORD for item in parameters),
    )
