"""GRPOTrainer: policy gradient on rewards of generated answers, whose baseline is the mean of their group."""

from mindspeed_ms import ops
from mindspeed_ms.core.autograd import detach, no_grad
from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import MAIN_LOSS, MicroBatchLoss
from mindspeed_ms.tasks.posttrain.losses import mean
from mindspeed_ms.tasks.posttrain.policy_losses import clipped_surrogate, divergence, group_advantages
from mindspeed_ms.tasks.posttrain.rollout_forward import log_probabilities_of
from mindspeed_ms.tasks.posttrain.rollout_trainer import RolloutTrainer
from mindspeed_ms.tasks.posttrain.sequences import per_token, sum_of_sequences, tokens_of_sequences
from mindspeed_ms.training.initialize import get_all_config


class GRPOTrainer(RolloutTrainer):
    """Group-relative policy optimisation: no critic; the loss is the mean over answers of the mean over their tokens."""

    stage = "grpo"
    divergence_option = "grpo_beta"

    def complete(self, rollout):
        """See RolloutTrainer: `advantages`, and log-probabilities `[n, s]`: of the reference, and of the weights that drew the
        answers where several steps learn from them."""
        plan = self.trainer.data.plan
        rollout["advantages"] = group_advantages(rollout["rewards"], plan.group).astype("float32").reshape(-1, 1)
        if plan.steps > 1:
            rollout["old_log_probs"] = log_probabilities_of(self, rollout)
        if self.reference is not None:
            rollout["reference_log_probs"] = self.reference_log_probs(rollout)

    @staticmethod
    def loss_func(input_tensor, output_tensor):
        """Loss of a micro-batch of answers; `input_tensor` is the micro-batch. See BaseTrainer."""
        settings, batch = get_all_config().training_config, input_tensor
        mask, log_probs = batch["loss_mask"], -output_tensor
        old = batch.get("old_log_probs", None)
        old = detach(log_probs) if old is None else old
        losses, is_clipped = clipped_surrogate(log_probs, old, batch["advantages"], settings.clip_ratio)
        tokens = tokens_of_sequences(mask)

        def means(values):
            return per_token(sum_of_sequences(values, mask), tokens)

        kl = None
        if "reference_log_probs" in batch:
            kl = divergence(log_probs, batch["reference_log_probs"])
            losses = losses + kl * settings.grpo_beta
        losses = means(losses)
        with no_grad():
            values = {MAIN_LOSS: losses, "reward": batch["rewards"], "response_length": batch["lengths"]}
            values["clip_fraction"] = means(is_clipped)
            if kl is not None:
                values["kl"] = means(detach(kl))
            reported = {name: (ops.total(value), float(value.size)) for name, value in values.items()}
        return MicroBatchLoss(mean(losses), reported)
