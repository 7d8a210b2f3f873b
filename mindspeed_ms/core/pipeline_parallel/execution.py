"""Execution of a pipeline schedule on one stage: forward and backward of its micro-batches, sending and receiving."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from mindspore import Tensor

from mindspeed_ms import ops
from mindspeed_ms.core import autograd, parallel_state
from mindspeed_ms.core.device import to_dtype
from mindspeed_ms.core.distributed import ShardedModel, unwrap_model
from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import (
    BackwardScale,
    MicroBatchLoss,
    as_float,
    filled,
    recording_auxiliary_losses,
)
from mindspeed_ms.layout.schedule_order import BACKWARD, FORWARD, Communicate


@dataclass
class PlanExecution:
    """One execution of a pipeline plan on one stage.

    Args:
        plan (PipelinePlan): the schedule.
        stage (int): this rank's stage.
        models (list[ShardedModel or Cell]): the stage's chunks.
        iterators (list): of micro-batches, one per chunk.
        forward_step_func (Callable): `(data_iterator, model) -> (output, loss_func)`.
        scale (BackwardScale): the gradient that a micro-batch's backward starts with.
        communicator (Optional[PipelineCommunicator]): None without other stages.
        description (Optional[ModelDescription]): None without other stages.
        collect_non_loss_data (bool): ask the loss function for that instead of losses.

    Attributes:
        collected (list): what the loss function reported, per micro-batch; empty unless the loss is on this stage.
    """

    plan: Any
    stage: int
    models: list
    iterators: list
    forward_step_func: Callable
    scale: BackwardScale
    communicator: Any = None
    description: Any = None
    collect_non_loss_data: bool = False

    def __post_init__(self):
        self.collected, self._tokens = [], []
        self._auxiliary = {}  # micro-batch -> {name: (sum, count)} of its auxiliary losses on this stage
        self._last_backwards = set(self.plan.last_backwards(self.stage).values())
        self._live = {}  # (micro-batch, chunk) -> (input, output, loss of the last stage)
        self._outgoing = {}  # (kind, micro-batch, chunk) -> tensor to send
        self._incoming = {}  # (kind, micro-batch, chunk) -> transfer under way
        self._sending = []

    def run(self):
        """Run all steps of the stage, then wait until everything is sent."""
        virtual_rank = parallel_state.get_virtual_pipeline_model_parallel_rank()
        for step in self.plan.steps[self.stage]:
            if isinstance(step, Communicate):
                self._communicate(step)
            elif step.kind == FORWARD:
                self._forward(step)
            else:
                self._backward(step)
        for sending in self._sending:
            sending.wait()
        self._sending.clear()
        _enter_chunk(virtual_rank)

    # ---- computing ----------------------------------------------------------------------------------------------------

    def _forward(self, step):
        _enter_chunk(step.chunk)
        key = step.micro_batch, step.chunk
        model, iterator = self.models[step.chunk], self.iterators[step.chunk]
        input_tensor = None
        if not self.plan.is_first(self.stage, step.chunk):
            input_tensor = self._received(FORWARD, key, to_dtype(self.description.residual_connection_dtype))
        no_grad = autograd.no_grad() if self.plan.forward_only else nullcontext()
        with no_grad, recording_auxiliary_losses(self._auxiliary.setdefault(step.micro_batch, {})):
            if input_tensor is not None:
                if not self.plan.forward_only:
                    autograd.set_requires_grad(input_tensor)
                _set_input_tensor(model, input_tensor)
            output, loss_func = self.forward_step_func(iterator, model)
            if input_tensor is not None:
                _set_input_tensor(model, None)  # or it would live until the chunk's next forward
            loss = None
            if self.plan.is_last(self.stage, step.chunk):
                loss = self._loss(output, loss_func)
        if not self.plan.is_last(self.stage, step.chunk):
            self._outgoing[(FORWARD, *key)] = _checked_output(output, model)
        if not self.plan.forward_only:
            self._live[key] = input_tensor, output if loss is None else loss.differentiated, loss

    def _loss(self, output, loss_func):
        """MicroBatchLoss of a micro-batch; None if other data than losses are collected."""
        if self.collect_non_loss_data:
            self.collected.append(loss_func(output, non_loss_data=True))
            return None
        loss = MicroBatchLoss.of(loss_func(output))
        self.collected.append(loss.reported)
        self._tokens.append(loss.tokens)
        return loss

    def reported(self):
        """`collected`, with the named auxiliary losses of this stage where losses are collected.

        Raises:
            ValueError: the loss function reported something under the name of an auxiliary loss.
        """
        if self.collect_non_loss_data or not any(self._auxiliary.values()):
            return self.collected
        auxiliary = [self._auxiliary[micro_batch] for micro_batch in sorted(self._auxiliary)]
        if not self.collected:
            return auxiliary
        for losses, others in zip(self.collected, auxiliary):
            if both := losses.keys() & others.keys():
                raise ValueError(
                    f"the loss function and attach_auxiliary_loss both report {', '.join(sorted(both))}: choose another name."
                )
        return [{**losses, **others} for losses, others in zip(self.collected, auxiliary)]

    def total_tokens(self):
        """Number of tokens (float) that the loss functions counted; waits for the device."""
        return sum((as_float(tokens) for tokens in self._tokens if tokens is not None), 0.0)

    def _backward(self, step):
        _enter_chunk(step.chunk)
        key = step.micro_batch, step.chunk
        input_tensor, output, loss = self._live.pop(key)
        if loss is not None:
            grad = filled(output.shape, self.scale.of_main_loss(loss), output.dtype)
        else:
            grad = self._received(BACKWARD, key, output.dtype)
        model = self.models[step.chunk]
        accumulates = isinstance(model, ShardedModel) and step not in self._last_backwards
        with model.no_sync() if accumulates else nullcontext():
            input_grad = _backward_through(input_tensor, output, grad)
        if input_tensor is not None:
            self._outgoing[(BACKWARD, *key)] = input_grad

    # ---- communicating ------------------------------------------------------------------------------------------------

    def _received(self, kind, key, dtype):
        """Received tensor that a step consumes, as a leaf of `dtype`."""
        tensor = self._incoming.pop((kind, *key)).wait()
        return tensor if tensor.dtype == dtype else autograd.detach(ops.cast(tensor, dtype))

    def _communicate(self, step):
        tensors = {
            transfer: self._outgoing.pop((transfer.kind, transfer.micro_batch, transfer.chunk))
            for transfer in step.transfers
            if transfer.action == "send"
        }
        for started in self.communicator.start(step.transfers, tensors):
            if not self.plan.overlap:
                started.wait()
            transfer = started.transfer
            if transfer.action == "recv":
                self._incoming[transfer.kind, transfer.micro_batch, transfer.chunk] = started
            else:
                self._sending.append(started)
        # a message that is under way holds the memory itself, so the output can give it up at once
        for transfer, tensor in tensors.items():
            if transfer.kind == FORWARD and not self.plan.forward_only:
                self._deallocate(tensor, transfer)
        self._sending = [sending for sending in self._sending if not sending.is_completed()]

    def _deallocate(self, output, transfer):
        input_tensor = self._live[transfer.micro_batch, transfer.chunk][0]
        if self.description.parallel.deallocate_pipeline_outputs and output is not input_tensor:
            autograd.deallocate_output(output)


def _enter_chunk(chunk):
    """Set the current virtual pipeline rank to `chunk`."""
    if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)


def _set_input_tensor(model, tensor):
    module = unwrap_model(model)
    if not hasattr(module, "set_input_tensor"):
        raise ValueError(
            f"{type(module).__name__} has no set_input_tensor: a model on several pipeline stages must take "
            "its input that way on all stages but the first."
        )
    module.set_input_tensor(tensor)


def _checked_output(output, model):
    if not isinstance(output, Tensor):
        module = unwrap_model(model)
        raise ValueError(
            f"{type(module).__name__} returned {type(output).__name__}: on all pipeline stages but the last "
            "the model must return its hidden states, one Tensor."
        )
    return output


def _backward_through(input_tensor, output, grad):
    """Run the backward of a chunk; returns the gradient of its input, or None for the model's first chunk."""
    if output is input_tensor:  # a chunk without layers
        return grad
    if autograd.requires_grad(output):  # not in a first chunk whose weights are all frozen
        autograd.backward(output, grad)
    if input_tensor is None:
        return None
    input_grad = autograd.tensor_grad(input_tensor)
    if input_grad is None:
        raise ValueError(
            "the output of a pipeline stage does not depend on its input: the model must work on the tensor "
            "that set_input_tensor() gives it."
        )
    autograd.set_grad(input_tensor, None)
    return input_grad
