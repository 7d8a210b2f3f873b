"""DPOTrainer: direct preference optimisation against a reference model."""

from mindspeed_ms.core.dist_checkpointing import folders
from mindspeed_ms.tasks.posttrain.losses import kto_pair_loss, margin_loss
from mindspeed_ms.tasks.posttrain.pairwise import PairwiseTrainer, pair_loss
from mindspeed_ms.tasks.posttrain.reference import MissingReferenceError, Reference, check_reference
from mindspeed_ms.tasks.posttrain.sequences import halves, log_probabilities, per_token
from mindspeed_ms.training.initialize import get_all_config


class DPOTrainer(PairwiseTrainer):
    """Direct preference optimisation: losses sigmoid, hinge, ipo, kto_pair.

    The reference's log-probabilities are computed once, before the first step, by the model that is then trained (see
    `reference`)."""

    stage = "dpo"

    def _check_stage(self):
        super()._check_stage()
        settings = self.all_config.training_config
        if not settings.dpo_reference_free:
            check_reference(self.all_config)
        if settings.dpo_reference_free or settings.ref_model:
            return
        wanted = settings.resume_training and not settings.finetune
        folder, _ = folders.checkpoint_to_start_from(
            settings.load_checkpoint, settings.output_dir, settings.pretrained_checkpoint, wanted
        )
        if folder is None:
            raise MissingReferenceError(
                "stage dpo needs the weights of a reference model: start from a checkpoint (--load or "
                "--pretrained-checkpoint), name another one with ref_model (--ref-model FOLDER), or set dpo_reference_free "
                "(--dpo-reference-free)."
            )

    def before_training(self):
        """Compute the reference's log-probabilities, or read them."""
        if not self.all_config.training_config.dpo_reference_free:
            Reference(self).prepare()

    @staticmethod
    def loss_func(input_tensor, output_tensor):
        """Loss of a micro-batch of pairs; see BaseTrainer and PairwiseTrainer."""
        settings = get_all_config().training_config
        loss_mask, reference = input_tensor
        sums, tokens = log_probabilities(output_tensor, loss_mask)
        ratios = sums if reference is None else sums - reference
        chosen, rejected = halves(ratios)
        beta, others = settings.dpo_beta, {}
        if settings.dpo_loss_type == "kto_pair":
            losses, chosen_kl, rejected_kl = kto_pair_loss(chosen, rejected, beta)
            others = {"kl/chosen": chosen_kl.reshape((1,)), "kl/rejected": rejected_kl.reshape((1,))}
        else:
            compared = halves(per_token(ratios, tokens)) if settings.dpo_loss_type == "ipo" else (chosen, rejected)
            losses = margin_loss(compared[0] - compared[1], beta, settings.dpo_loss_type, settings.dpo_label_smoothing)
        if settings.pref_ftx:
            cross_entropy = -halves(per_token(sums, tokens))[0]
            losses = losses + cross_entropy * settings.pref_ftx
            others["sft_loss"] = cross_entropy
        log_probs = dict(zip(("logps/chosen", "logps/rejected"), halves(sums)))
        return pair_loss(losses, chosen * beta, rejected * beta, loss_mask, **log_probs, **others)
