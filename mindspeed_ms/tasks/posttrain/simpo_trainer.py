"""SimPOTrainer: simple preference optimisation, by mean log-probabilities and a target margin, without a reference."""

from mindspeed_ms.tasks.posttrain.losses import margin_loss
from mindspeed_ms.tasks.posttrain.pairwise import PairwiseTrainer, pair_loss
from mindspeed_ms.tasks.posttrain.sequences import halves, log_probabilities, per_token
from mindspeed_ms.training.initialize import get_all_config


class SimPOTrainer(PairwiseTrainer):
    """Simple preference optimisation: losses sigmoid, hinge, ipo of `chosen - rejected - gamma_beta_ratio`, of means over the
    tokens of an answer."""

    stage = "simpo"

    @staticmethod
    def loss_func(input_tensor, output_tensor):
        """Loss of a micro-batch of pairs; see BaseTrainer and PairwiseTrainer."""
        settings = get_all_config().training_config
        loss_mask, _ = input_tensor
        chosen, rejected = halves(per_token(*log_probabilities(output_tensor, loss_mask)))
        losses = margin_loss(
            chosen - rejected - settings.gamma_beta_ratio,
            settings.simpo_beta,
            settings.simpo_loss_type,
            settings.simpo_label_smoothing,
        )
        beta = settings.simpo_beta
        others = {"logps/chosen": chosen, "logps/rejected": rejected}
        return pair_loss(losses, chosen * beta, rejected * beta, loss_mask, **others)
