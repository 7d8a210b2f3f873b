"""PairwiseTrainer: what the stages have in common that learn from a chosen and a rejected answer."""

from functools import partial

from mindspore import dtype, mint

from mindspeed_ms import ops
from mindspeed_ms.core.autograd import no_grad
from mindspeed_ms.core.context_parallel import get_batch_on_this_cp_rank
from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import MAIN_LOSS, MicroBatchLoss
from mindspeed_ms.tasks.posttrain.base_trainer import BaseTrainer
from mindspeed_ms.tasks.posttrain.losses import mean
from mindspeed_ms.tasks.posttrain.sequences import halves, tokens_of_sequences

REFERENCE = ("chosen_reference", "rejected_reference")


class PairwiseTrainer(BaseTrainer):
    """Learning from pairs of answers. A micro-batch of n pairs is 2n sequences: the chosen ones, then the rejected ones."""

    @staticmethod
    def get_batch(data_iterator):
        """This rank's part of the next micro-batch: (tokens, labels, loss_mask, attention_mask, position_ids, reference), `[2n,
        s]`; the reference's log-probabilities `[2n]`, None without one. Causal attention alone: the mask is None."""
        batch = next(data_iterator)
        joined = {
            name: ops.cat([batch[f"chosen_{name}"], batch[f"rejected_{name}"]]) for name in ("tokens", "labels", "loss_mask")
        }
        joined["position_ids"] = ops.cat([batch["position_ids"]] * 2)
        joined = get_batch_on_this_cp_rank(joined)
        reference = ops.cat([batch[name] for name in REFERENCE]) if REFERENCE[0] in batch else None
        return joined["tokens"], joined["labels"], joined["loss_mask"], None, joined["position_ids"], reference

    def forward_step(self, data_iterator, model):
        """See BaseTrainer; `loss_func` is given (loss mask, reference)."""
        self.timers("batch-generator", log_level=2).start()
        tokens, labels, loss_mask, attention_mask, position_ids, reference = self.get_batch(data_iterator)
        self.timers("batch-generator").stop()
        output_tensor = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
        return output_tensor, partial(self.loss_func, (loss_mask, reference))


def pair_loss(losses, chosen_rewards, rejected_rewards, loss_mask=None, **others):
    """MicroBatchLoss of pairs.

    Args:
        losses (Tensor): of each pair `[n]`; their mean is differentiated.
        chosen_rewards, rejected_rewards (Tensor): `[n]`, to report.
        loss_mask (Optional[Tensor]): `[2n, s]`, to report the lengths of the answers.
        others (Tensor): further values `[n]` to report, by name.
    """
    loss = mean(losses)
    with no_grad():
        values = {
            MAIN_LOSS: losses,
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/margins": chosen_rewards - rejected_rewards,
            "rewards/accuracies": ops.cast(mint.gt(chosen_rewards, rejected_rewards), dtype.float32),
            **others,
        }
        if loss_mask is not None:
            lengths = halves(tokens_of_sequences(loss_mask))
            values |= {"response_length/chosen": lengths[0], "response_length/rejected": lengths[1]}
        reported = {name: (ops.total(value), float(value.size)) for name, value in values.items()}
    return MicroBatchLoss(loss, reported)
