"""Forward-backward schedules over all micro-batches of a step. Names and arguments: Megatron core, `schedules.py`.

The order of work is a plan of `layout.schedule_order`; `execution` runs it.
"""

from functools import lru_cache
from itertools import tee

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.pipeline_parallel.execution import PlanExecution
from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import BackwardScale, published
from mindspeed_ms.core.pipeline_parallel.p2p_communication import PipelineCommunicator, tensor_shape
from mindspeed_ms.layout.schedule_order import build_plan


def get_forward_backward_func():
    """Schedule of this run's pipeline layout: `forward_backward`, which serves all layouts."""
    return forward_backward


_plan = lru_cache(maxsize=32)(build_plan)


def forward_backward(
    *,
    forward_step_func,
    data_iterator,
    model,
    num_microbatches,
    seq_length=None,
    micro_batch_size=None,
    decoder_seq_length=None,
    forward_only=False,
    collect_non_loss_data=False,
    first_val_step=None,
    backward_scale=None,
    finalize_model_grads_func=None,
):
    """Run every micro-batch of a step forward and backward on this stage.

    Without a pipeline one after the other (Megatron's `forward_backward_no_pipelining`), else 1F1B, where stage r of pp has
    at most pp - r micro-batches in flight, or interleaved over the stage's chunks (its
    `forward_backward_pipelining_without_interleaving`, `..._with_interleaving`).

    Args:
        forward_step_func (Callable): `(data_iterator, model) -> (output, loss_func)`; `loss_func(output)` returns
            a `MicroBatchLoss`, or Megatron's `(loss, reported)` or `(loss, num_tokens, reported)`. It is called where the
            model ends; elsewhere the output goes to the next stage.
        data_iterator (Iterator or list with one per chunk): gives the micro-batches. A single one serves all chunks:
            each gets every micro-batch.
        model (Cell or list of this stage's chunks): the model.
        num_microbatches (int): how many micro-batches.
        seq_length, micro_batch_size (Optional[int]): of the tensors between stages; None: as configured.
        forward_only (bool): no backward (evaluation).
        collect_non_loss_data (bool): call `loss_func(output, non_loss_data=True)` and collect its results; only with
            `forward_only`.
        backward_scale (Optional[BackwardScale]): None: losses are means over the micro-batches, without a loss scale.
        finalize_model_grads_func (Optional[Callable]): called with (model chunks, number of tokens or None) after the last
            backward.
        decoder_seq_length, first_val_step: of Megatron's signature, for a decoder beside an encoder and fp8: only None.

    Returns:
        list: what the loss function reported and the named auxiliary losses of this stage, one entry per micro-batch; empty
            on stages that have neither.

    Raises:
        ValueError: another number of chunks than the layout has, a model that does not work in a pipeline, or an argument
            that only other architectures have.
        PipelineMismatchError: a stage sends another shape than the next one expects.
    """
    _only_decoders(decoder_seq_length, first_val_step)
    if collect_non_loss_data and not forward_only:
        raise ValueError("collect_non_loss_data gives no loss to go backward from: it needs forward_only=True.")
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    models = _per_chunk(model, chunks, "model")
    communicator = description = None
    group_size, overlap = None, False
    if stages > 1:
        description = describe_model(models[0].config)
        parallel = description.parallel
        communicator = PipelineCommunicator(description, tensor_shape(description, seq_length, micro_batch_size))
        group_size = parallel.microbatch_group_size_per_virtual_pipeline_stage if chunks > 1 else None
        # the length of a message must be known before it can be received, so exchanging shapes excludes overlap
        overlap = chunks > 1 and parallel.overlap_p2p_comm and not parallel.variable_seq_lengths
    plan = _plan(stages, num_microbatches, chunks, group_size, forward_only, overlap)
    scale = backward_scale or BackwardScale(1.0, num_microbatches)
    execution = PlanExecution(
        plan,
        parallel_state.get_pipeline_model_parallel_rank(),
        models,
        _iterators(data_iterator, chunks),
        forward_step_func,
        scale,
        communicator,
        description,
        collect_non_loss_data,
    )
    with published(scale):
        execution.run()
    if not forward_only and finalize_model_grads_func is not None:
        finalize_model_grads_func(models, execution.total_tokens() if scale.per_token else None)
    return execution.reported()


def _only_decoders(decoder_seq_length, first_val_step):
    for name, value, use in (
        ("decoder_seq_length", decoder_seq_length, "models with encoder and decoder"),
        ("first_val_step", first_val_step, "fp8 weights, which validation quantises once"),
    ):
        if value is not None:
            raise ValueError(f"{name} {value!r} is for {use}, which do not exist here: leave it out.")


def _per_chunk(model, chunks, name):
    """`model` as a list with one entry per chunk."""
    models = list(model) if isinstance(model, (list, tuple)) else [model]
    if len(models) != chunks:
        raise ValueError(
            f"{name} has {len(models)} entries: expected {chunks}, one for each chunk of this pipeline stage "
            "(virtual_pipeline_model_parallel_size)."
        )
    return models


def _iterators(data_iterator, chunks):
    """Iterators, one per chunk; chunks that share one get each of its micro-batches."""
    if isinstance(data_iterator, (list, tuple)):
        return _per_chunk(data_iterator, chunks, "data_iterator")
    if chunks == 1 or data_iterator is None:
        return [data_iterator] * chunks
    return list(tee(data_iterator, chunks))
