"""SFTTrainer: supervised fine-tuning, cross entropy of the answers' tokens."""

from functools import partial

from mindspeed_ms import ops
from mindspeed_ms.core.autograd import detach
from mindspeed_ms.core.context_parallel import get_batch_on_this_cp_rank
from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import MAIN_LOSS, MicroBatchLoss
from mindspeed_ms.core.tensor_parallel.mappings import reduce_from_context_parallel_region
from mindspeed_ms.tasks.posttrain.base_trainer import BaseTrainer
from mindspeed_ms.training.losses import TokenMean

BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


class SFTTrainer(BaseTrainer):
    """Supervised fine-tuning. The loss is the mean over the answers' tokens of the global batch (`calculate_per_token_loss`,
    the default here), or with `calculate_per_token_loss: False` the mean of the micro-batches' means, as upstream's."""

    stage = "sft"

    @staticmethod
    def get_batch(data_iterator):
        """See BaseTrainer."""
        batch = get_batch_on_this_cp_rank(next(data_iterator))
        return tuple(batch.get(name) for name in BATCH)

    @staticmethod
    def loss_func(input_tensor, output_tensor):
        """Mean of the masked losses; see BaseTrainer."""
        tokens = ops.total(input_tensor)
        total = reduce_from_context_parallel_region(ops.total(output_tensor * input_tensor))
        count = reduce_from_context_parallel_region(tokens)
        mean = total / (count + ops.is_zero(count))  # without a token: 0 / 1
        reported = {MAIN_LOSS: TokenMean(detach(mean), tokens, input_tensor)}
        return MicroBatchLoss(mean, reported)

    def forward_step(self, data_iterator, model):
        """See BaseTrainer."""
        self.timers("batch-generator", log_level=2).start()
        tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
        self.timers("batch-generator").stop()
        output_tensor = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
        return output_tensor, partial(self.loss_func, loss_mask)
