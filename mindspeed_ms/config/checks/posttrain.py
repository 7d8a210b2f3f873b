"""Rules about post-training: stage, kind of data, losses."""

from mindspeed_ms.config.checks.rule import rule
from mindspeed_ms.config.sections.posttrain import PAIRWISE_STAGES

_T, _D, _M = "training_config", "dataset_config", "model_config"
_KINDS = {"sft": "conversations", "prm": "step rewards"}


@rule
def data_fit_the_stage(context):
    """Refuse a kind of data that is not the stage's, and pairs without a stage."""
    stage, dataset = context.training.stage, context.dataset
    if stage is None:
        if dataset.is_pairwise_dataset:
            yield context.problem(
                f"{_D}.is_pairwise_dataset", f"needs a stage that trains on pairs: {', '.join(PAIRWISE_STAGES)} (--stage)"
            )
        return
    is_pairwise = stage in PAIRWISE_STAGES
    for name, expected in (("is_pairwise_dataset", is_pairwise), ("is_instruction_dataset", not is_pairwise)):
        if dataset[name] != expected:
            kind = "pairs of answers" if is_pairwise else _KINDS.get(stage, "prompts")
            yield context.problem(f"{_D}.{name}", f"stage {stage} trains on {kind}; leave it out", f"{_T}.stage")


@rule
def loss_fits_the_stage(context):
    """Refuse settings of the loss per token where the loss is one of pairs, or of steps."""
    stage = context.training.stage
    if stage in PAIRWISE_STAGES and context.training.calculate_per_token_loss:
        yield context.problem(
            f"{_T}.calculate_per_token_loss",
            f"the loss of stage {stage} is a mean over pairs, the same in any split into micro-batches; leave it out",
        )
    if stage not in (None, "sft") and context.model is not None:
        if context.model.label_smoothing:
            option = f"; {stage}_label_smoothing smooths the preference" if stage in ("dpo", "simpo") else ""
            yield context.problem(f"{_M}.label_smoothing", f"stage {stage} needs log-probabilities of the answers{option}")
        if stage in ("orm", "prm") and context.model.loss_chunk_size:
            what = "looks at all logits of a position" if stage == "prm" else "has no logits"
            yield context.problem(f"{_M}.loss_chunk_size", f"stage {stage} {what}; leave it out")
    if stage in ("orm", "trl_ppo") and context.lora.lora_ckpt_filter:
        what = "a reward model" if stage == "orm" else "the critic"
        yield context.problem("lora_config.lora_ckpt_filter", f"the head of {what} is trained too; leave it out")


@rule
def one_reference(context):
    """Refuse a reference model beside a training without one."""
    if context.training.stage == "dpo" and context.training.dpo_reference_free and context.training.ref_model:
        yield context.problem(
            f"{_T}.ref_model", "and dpo_reference_free contradict each other; keep one", f"{_T}.dpo_reference_free"
        )


@rule
def packed_data_are_conversations(context):
    """Refuse packing of pairs and step rewards."""
    if context.training.stage in (*PAIRWISE_STAGES, "prm"):
        for name in ("pack", "neat_pack"):
            if context.dataset[name]:
                yield context.problem(f"{_D}.{name}", "packs conversations alone; leave it out", f"{_T}.stage")
