"""Interfaces of data parallelism: `ShardedModel`, base class of the wrappers of a model chunk, and `Optimizer`."""

from contextlib import nullcontext
from typing import Any, Protocol

from mindspore import nn


class ShardedModel(nn.Cell):
    """Data-parallel wrapper of a model chunk; `DistributedDataParallel` is one.

    Schedules, `finalize_model_grads`, the training step, evaluation and checkpoints use nothing else of a wrapper than what
    is here. The optimizer belongs to the wrapper: what it needs beside these methods is between the two.

    After the last backward of a step and `finish_grad_sync`, each trainable parameter has its gradient in `main_grad`, or
    this rank's piece of it.

    Args:
        module (nn.Cell): the model chunk.
        config (Optional[ModelDescription]): read by schedules with several pipeline stages; None without them.
        calculate_per_token_loss (bool): losses are sums over tokens: gradients are summed over data-parallel ranks, not
            averaged, and `finalize_model_grads` divides them.
    """

    def __init__(self, module, config=None, calculate_per_token_loss=False):
        super().__init__(auto_prefix=False)  # the parameters keep their state-dict keys
        self.module = module
        self.config = config
        self.calculate_per_token_loss = calculate_per_token_loss

    def construct(self, *args, **kwargs):
        """The module's own construct."""
        return self.module(*args, **kwargs)

    def set_input_tensor(self, input_tensor):
        """Hand the input of a later pipeline stage to the module."""
        self.module.set_input_tensor(input_tensor)

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def no_sync(self):
        """Context manager of all backwards of a step but the last: gradients are only accumulated."""
        return nullcontext()

    def finish_grad_sync(self):
        """Leave the reduced gradients in every `main_grad`."""
        raise NotImplementedError

    def scale_gradients(self, factor):
        """Multiply all gradients by a number."""
        raise NotImplementedError

    def non_finite_gradients(self):
        """Names of parameters whose local gradients of this step held NaN or infinity, where that is checked."""
        return []

    def trainable_parameters(self):
        """list[Parameter]: those that have a `main_grad`."""
        return [param for param in self.module.get_parameters() if param.requires_grad]

    def routers_with_bias(self):
        """list[Cell]: routers whose expert bias a step moves, see `expert_parallel.balance.update_expert_biases`."""
        return [cell for _, cell in self.module.cells_and_names() if getattr(cell, "expert_bias", None) is not None]

    # ---- parameters --------------------------------------------------------------------------------------------------

    def finish_param_sync(self):
        """Wait until parameters that are held in full are up to date; all data-parallel ranks call it."""

    def whole_parameters(self, changes=False):
        """Context manager: inside, every parameter is up to date and in full; all data-parallel ranks enter together.

        Args:
            changes (bool): values are written inside: ranks keep their parts of them.
        """
        del changes
        return nullcontext()

    def parameter_pieces(self):
        """Parameters that are held in part: {id of parameter: (shape, [(start, stop, Tensor)])}, the elements `start` to
        `stop` of the flattened parameter of that shape. A rank may hold no piece of one."""
        return {}

    def replicas(self):
        """Weights that several ranks must hold equally: list[(ProcessGroup, Tensor)]."""
        return []


class Optimizer(Protocol):
    """What the training step and checkpoints use of an optimizer; `MegatronOptimizer` is one."""

    param_groups: list  # dicts whose `lr` and `weight_decay` a scheduler sets; `is_decoupled_lr`: not the reported rate

    def zero_grad(self):
        """Start a step: gradients count from zero."""

    def get_loss_scale(self) -> float:
        """What the loss is multiplied with before the backward."""

    def step(self) -> tuple[bool, float, int | None]:
        """Update once: (whether gradients were finite, gradient norm before clipping, zero gradients if counted)."""

    def get_params_norm(self) -> float:
        """Norm of the weights over all ranks."""

    def reload_model_params(self):
        """Take the parameters' present values as masters, after weights were loaded."""

    def pieces_with_states(self) -> Any:
        """Yield (Piece, {name: Tensor}) of the state that this rank holds; see `MegatronOptimizer`."""

    def counters(self) -> dict:
        """What a checkpoint needs beside the tensors."""

    def load_counters(self, counters: dict):
        """Restore `counters()` after the tensors were loaded."""


def unwrap_model(model):
    """The module inside a `ShardedModel` (or the cell itself); a list gives a list."""
    if isinstance(model, (list, tuple, nn.CellList)):
        return [unwrap_model(chunk) for chunk in model]
    return model.module if isinstance(model, ShardedModel) else model
