"""PPOTrainer: proximal policy optimisation on rewards of generated answers, with a critic. Source of the forms: TRL."""

import numpy as np

from mindspeed_ms import ops
from mindspeed_ms.core.autograd import no_grad
from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import MAIN_LOSS, MicroBatchLoss
from mindspeed_ms.tasks.posttrain.policy_losses import clipped_surrogate, clipped_value_loss, generalized_advantages, whitened
from mindspeed_ms.tasks.posttrain.rollout_forward import outputs_of
from mindspeed_ms.tasks.posttrain.rollout_trainer import RolloutTrainer
from mindspeed_ms.tasks.posttrain.sequences import halves
from mindspeed_ms.training.initialize import get_all_config


class PPOTrainer(RolloutTrainer):
    """Proximal policy optimisation. The critic is a head of values on the policy's own layers; the loss is a mean over the
    tokens of the global batch."""

    stage = "trl_ppo"
    divergence_option = "kl_coef"

    def complete(self, rollout):
        """See RolloutTrainer: `old_log_probs`, `old_values`, `advantages` (whitened over the rollout), `returns` and `kl`
        `[n, s]`. A token is rewarded with `-kl_coef (log-probability - reference's)`, the last one with the answer's too."""
        settings, mask = self.all_config.training_config, rollout["loss_mask"]
        losses, values = outputs_of(self, rollout)
        old, rewards, kl = -losses, np.zeros(mask.shape), np.zeros_like(mask)
        if self.reference is not None:
            ratios = self.reference_log_probs(rollout).astype(np.float64) - old
            rewards = settings.kl_coef * ratios
            kl = (np.expm1(np.minimum(ratios, 20)) - ratios).astype(np.float32)
        last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
        rewards[np.arange(len(mask)), last] += rollout["rewards"]
        advantages, returns = generalized_advantages(rewards, values, mask, settings.gamma, settings.lam)
        found = {"old_log_probs": old, "old_values": values, "advantages": whitened(advantages, mask), "returns": returns}
        rollout.update({name: value.astype(np.float32) for name, value in found.items()}, kl=kl)

    @staticmethod
    def loss_func(input_tensor, output_tensor):
        """Loss of a micro-batch of answers; `output_tensor` is losses and values `[2b, s]`. See BaseTrainer."""
        settings, batch = get_all_config().training_config, input_tensor
        mask = batch["loss_mask"]
        losses, values = halves(output_tensor)
        policy, is_clipped = clipped_surrogate(-losses, batch["old_log_probs"], batch["advantages"], settings.clip_ratio)
        critic = clipped_value_loss(values, batch["old_values"], batch["returns"], settings.cliprange_value)
        total = ops.total((policy + critic * settings.vf_coef) * mask)
        with no_grad():
            tokens, answers = ops.total(mask), float(mask.shape[0])
            reported = {MAIN_LOSS: (total, tokens)}
            of_tokens = {"policy_loss": policy, "value_loss": critic, "clip_fraction": is_clipped, "kl": batch["kl"]}
            reported |= {name: (ops.total(one * mask), tokens) for name, one in of_tokens.items()}
            reported["reward"] = ops.total(batch["rewards"]), answers
            reported["response_length"] = ops.total(batch["lengths"]), answers
        return MicroBatchLoss(total, reported, tokens)
