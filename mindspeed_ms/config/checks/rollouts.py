"""Rules about PPO and GRPO: training on rewards of generated answers (rollouts)."""

from mindspeed_ms.config.checks.rule import rule
from mindspeed_ms.config.sections.posttrain import ROLLOUT_STAGES

_T, _D, _M, _P = "training_config", "dataset_config", "model_config", "parallel_config"


@rule
def layout_can_generate(context):
    """Refuse layouts and settings in which the model that is trained cannot generate."""
    stage, parallel = context.training.stage, context.parallel
    if stage not in ROLLOUT_STAGES:
        return
    without = f"stage {stage} generates with the model that is trained, which "
    if parallel.context_parallel_size > 1:
        yield context.problem(f"{_P}.context_parallel_size", without + "cuts no sequences; expected 1", f"{_T}.stage")
    if parallel.sequence_parallel:
        yield context.problem(f"{_P}.sequence_parallel", without + "cuts no sequences; leave it out", f"{_T}.stage")
    if parallel.zero_level == "z3":
        yield context.problem(f"{_P}.zero_level", without + "needs whole weights; take z1 or z2", f"{_T}.stage")
    if parallel.variable_seq_lengths:
        yield context.problem(f"{_P}.variable_seq_lengths", f"stage {stage} fills answers up to seq_length; leave it out")


@rule
def rollouts_fit_the_steps(context):
    """Refuse sizes of rollouts that do not divide, and other orders of the data."""
    stage, training, dataset = context.training.stage, context.training, context.dataset
    if stage not in ROLLOUT_STAGES:
        return
    batch, size, group = dataset.global_batch_size, training.rollout_batch_size, training.num_generations
    if stage == "grpo" and group < 2:
        yield context.problem(f"{_T}.num_generations", "the baseline is the mean of a group; expected at least 2")
    if batch and size and size % batch:
        yield context.problem(f"{_T}.rollout_batch_size", f"expected a multiple of the global batch size {batch}")
    elif batch and (size or batch) % group:
        name = "rollout_batch_size" if size else "the global batch size"
        yield context.problem(f"{_T}.num_generations", f"expected a divisor of {name} {size or batch}, which counts answers")
    if training.calculate_per_token_loss and stage == "grpo":
        yield context.problem(f"{_T}.calculate_per_token_loss", "the loss of stage grpo is a mean over answers; leave it out")
    if training.reward_model and training.reward_function:
        yield context.problem(
            f"{_T}.reward_model", "and reward_function both give the rewards; keep one", f"{_T}.reward_function"
        )
    if dataset.rampup_batch_size:
        yield context.problem(f"{_D}.rampup_batch_size", f"stage {stage} has steps of one size; leave it out")
    if dataset.dataloader_type == "cyclic" or (dataset.shuffle and context.was_set(f"{_D}.shuffle")):
        name = "dataloader_type" if dataset.dataloader_type == "cyclic" else "shuffle"
        yield context.problem(f"{_D}.{name}", f"stage {stage} shuffles prompts by itself; leave it out")
    if training.epochs:
        yield context.problem(
            f"{_T}.epochs", f"stage {stage} generates what it learns from: give training_iters (--train-iters)"
        )
    for name in ("pack", "neat_pack"):
        if dataset[name]:
            yield context.problem(f"{_D}.{name}", "packs conversations alone; leave it out", f"{_T}.stage")
    if training.eval_iters and context.was_set(f"{_T}.eval_interval") and training.eval_interval:
        yield context.problem(f"{_T}.eval_interval", f"stage {stage} has no validation data; its reward is in every line")
