"""OptimizerConfig: options of the optimizer, under Megatron core's names."""

from dataclasses import dataclass, field

from mindspeed_ms.config.sections.optimizer import CLIP_TYPES
from mindspeed_ms.core.optimizer.update_rule import update_rule


@dataclass
class OptimizerConfig:
    """Options of `get_megatron_optimizer`.

    Attributes:
        optimizer (str): a name of the configuration's `OPTIMIZERS`, in any case: adam, sgd, ...
        lr, min_lr (float): rates that a scheduler moves between.
        decoupled_lr, decoupled_min_lr (Optional[float]): the same for embedding and output layer.
        weight_decay (float): decoupled decay (adam), L2 (sgd).
        no_weight_decay_params (Optional[list[str]]): endings of the names without decay; None: Megatron's rule (biases
            and everything with one dimension).
        fp16, bf16 (bool): the parameters are half precision and get float32 masters.
        loss_scale (Optional[float]): a fixed loss scale; None: with fp16 a dynamic one.
        initial_loss_scale, min_loss_scale, loss_scale_factor (float), loss_scale_window, hysteresis (int): the dynamic
            one.
        adam_beta1, adam_beta2, adam_eps, sgd_momentum (float): of the update.
        clip_grad (float): the norm (or value) to clip to; 0 for none.
        grad_clip_type (str): ClipGlobalNorm or GradClipByValue.
        log_num_zeros_in_grad (bool): count the zero gradients of each step.
        cpu_offload (bool): keep the optimizer's state in the host's memory; on CPU it is there in any case.
    """

    optimizer: str = "adam"
    lr: float | None = None
    min_lr: float | None = None
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    weight_decay: float = 0.01
    no_weight_decay_params: list | None = field(default=None)
    fp16: bool = False
    bf16: bool = False
    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_factor: float = 2.0
    loss_scale_window: int = 1000
    hysteresis: int = 2
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    clip_grad: float = 1.0
    grad_clip_type: str = "ClipGlobalNorm"
    log_num_zeros_in_grad: bool = False
    cpu_offload: bool = False

    def __post_init__(self):
        update_rule(self.optimizer)  # the name must be known
        if self.grad_clip_type not in CLIP_TYPES:
            raise ValueError(f"grad_clip_type is {self.grad_clip_type!r}: expected one of {', '.join(CLIP_TYPES)}.")
        if self.clip_grad < 0.0:
            raise ValueError(f"clip_grad is {self.clip_grad}: expected a number that is not negative; 0 switches it off.")
