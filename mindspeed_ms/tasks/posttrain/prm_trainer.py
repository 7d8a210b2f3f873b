"""PRMTrainer: rewards of steps, cross entropy of a label at each placeholder."""

import numpy as np
from mindspore import dtype, mint

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.autograd import no_grad
from mindspeed_ms.core.datasets.instruction_builder import reward_ids
from mindspeed_ms.core.storage import from_array
from mindspeed_ms.legacy.model.loss_func import TokenLosses
from mindspeed_ms.tasks.posttrain.sft_trainer import SFTTrainer

_LOWEST, _LOWEST_HALF = -1e9, -3e4  # added to the logit of an id that is no label


class StepLosses(TokenLosses):
    """Losses of the labels among some ids, and where the label has the largest logit of them: two float32 `[b, s]`.

    Args:
        loss_func (Cell): vocabulary-parallel cross entropy.
        ids (tuple[int]): ids that a label may be; empty: all.
    """

    def __init__(self, loss_func, ids):
        super().__init__(loss_func)
        self.ids, self._bias = ids, None

    def construct(self, logits, label, loss_mask=None):
        """See LossWithMask: logits `[s, b, v / tp]`, label `[s, b]`."""
        group, size = parallel_state.get_tensor_model_parallel_group(), logits.shape[-1]
        start = group.rank * size
        if self.ids:
            if self._bias is None:
                bias = np.full(size, _LOWEST_HALF if logits.dtype == dtype.float16 else _LOWEST, np.float32)
                bias[[number - start for number in self.ids if start <= number < start + size]] = 0.0
                self._bias = from_array(bias).astype(logits.dtype)
            logits = ops.add_bias(logits, self._bias)
        with no_grad():
            maximum = ops.cross_entropy_local_max(logits)
            if group.size > 1:
                maximum = group.all_reduce(maximum, op="max")
            _, below_maximum, _ = ops.cross_entropy_local_sums(logits, maximum, label, start, start + size)
            if group.size > 1:
                below_maximum = group.all_reduce(below_maximum)
            correct = mint.transpose(ops.is_zero(below_maximum), 0, 1).contiguous()
        return super().construct(logits, label, loss_mask), correct


class PRMTrainer(SFTTrainer):
    """Process reward model: at each placeholder the label of its step among `reward_tokens` (default: all ids). The loss is the
    mean over the steps of the global batch, unless `calculate_per_token_loss: False`."""

    stage = "prm"

    def transform(self, cell):
        """See BaseTrainer."""
        if getattr(cell, "loss", None) is not None:
            cell.loss = StepLosses(cell.loss.loss_func, reward_ids(self.all_config.dataset_config))
        return cell

    @staticmethod
    def loss_func(input_tensor, output_tensor):
        """As of SFTTrainer, with the share of correct labels; `output_tensor` is what StepLosses gives."""
        losses, correct = output_tensor
        loss = SFTTrainer.loss_func(input_tensor, losses)
        loss.reported["accuracy"] = (ops.total(correct * input_tensor), ops.total(input_tensor))
        return loss
