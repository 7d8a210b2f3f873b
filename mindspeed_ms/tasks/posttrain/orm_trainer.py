"""ORMTrainer: reward model of whole answers, from pairs of them."""

from mindspore import dtype, mint

from mindspeed_ms import ops
from mindspeed_ms.core.context_parallel import get_batch_on_this_cp_rank
from mindspeed_ms.tasks.posttrain.losses import reward_loss
from mindspeed_ms.tasks.posttrain.pairwise import PairwiseTrainer, pair_loss
from mindspeed_ms.tasks.posttrain.sequences import halves, sum_of_sequences


class ORMTrainer(PairwiseTrainer):
    """Outcome reward model: a GPT with a head of one value per token; the value at the last token is the reward."""

    stage = "orm"

    @staticmethod
    def get_batch(data_iterator):
        """See PairwiseTrainer; the loss mask is 1 at the last token of each sequence alone, there are no labels."""
        batch = next(data_iterator)
        position_ids = ops.cat([batch["position_ids"]] * 2)
        last = ops.cat([batch["chosen_length"], batch["rejected_length"]]).reshape((-1, 1)) - 1
        joined = {
            "tokens": ops.cat([batch["chosen_tokens"], batch["rejected_tokens"]]),
            "loss_mask": ops.cast(mint.eq(position_ids, last), dtype.float32),
            "position_ids": position_ids,
        }
        joined = get_batch_on_this_cp_rank(joined)
        return joined["tokens"], None, joined["loss_mask"], None, joined["position_ids"], None

    @staticmethod
    def loss_func(input_tensor, output_tensor):
        """Loss of a micro-batch of pairs; `output_tensor` is the values `[2n, s]`. See BaseTrainer and PairwiseTrainer."""
        loss_mask, _ = input_tensor
        chosen, rejected = halves(sum_of_sequences(output_tensor, loss_mask))
        return pair_loss(reward_loss(chosen, rejected), chosen, rejected)
