"""Rules about learning rate, weight decay and clipping."""

from mindspeed_ms.config.checks.rule import rule

_O, _T, _D = "optimizer_config", "training_config", "dataset_config"


@rule
def learning_rates_in_order(context):
    """Refuse a `min_lr`, warm-up start or `decoupled_min_lr` above its learning rate."""
    optimizer = context.optimizer
    if optimizer.min_lr > optimizer.learning_rate:
        yield context.problem(f"{_O}.min_lr", "must not be above the learning rate", f"{_O}.learning_rate")
    if optimizer.lr_warmup_init > optimizer.learning_rate:
        yield context.problem(f"{_O}.lr_warmup_init", "must not be above the learning rate", f"{_O}.learning_rate")
    if optimizer.decoupled_min_lr is not None:
        highest = optimizer.decoupled_lr if optimizer.decoupled_lr is not None else optimizer.learning_rate
        if optimizer.decoupled_min_lr > highest:
            yield context.problem(f"{_O}.decoupled_min_lr", "must not be above decoupled_lr", f"{_O}.decoupled_lr")


@rule
def warm_up_ends_before_decay(context):
    """Refuse a warm-up that ends after the decay, or is given twice."""
    optimizer = context.optimizer
    pairs = (
        ("lr_warmup_iters", "lr_decay_iters", f"{_T}.training_iters", context.training.training_iters),
        ("lr_warmup_samples", "lr_decay_samples", f"{_D}.train_samples", context.dataset.train_samples),
    )
    for warm_up, decay, length_path, length in pairs:
        end = optimizer[decay] or length
        if optimizer[warm_up] and end and optimizer[warm_up] >= end:
            yield context.problem(
                f"{_O}.{warm_up}",
                f"must end before the decay does, at {end}",
                f"{_O}.{decay}" if optimizer[decay] else length_path,
            )
    if optimizer.lr_warmup_fraction is not None:
        for name in ("lr_warmup_iters", "lr_warmup_samples"):
            if optimizer[name]:
                yield context.problem(f"{_O}.lr_warmup_fraction", f"and {name} both give the warm-up; keep one", f"{_O}.{name}")
        if optimizer.lr_warmup_fraction >= 1:
            yield context.problem(f"{_O}.lr_warmup_fraction", "must end before the decay does; expects a number < 1")


@rule
def one_unit_of_length(context):
    """Refuse schedule lengths in samples for a run counted in iterations, and the reverse."""
    by_samples, by_iterations = context.dataset.train_samples, context.training.training_iters
    for unit, wrong in (("samples", by_iterations), ("iters", by_samples)):
        for name in (f"lr_decay_{unit}", f"lr_warmup_{unit}", f"lr_wsd_decay_{unit}"):
            if wrong and context.optimizer[name]:
                length = f"{_T}.training_iters" if unit == "samples" else f"{_D}.train_samples"
                yield context.problem(f"{_O}.{name}", "is in another unit than the length of the run", length)


@rule
def last_part_of_wsd(context):
    """Refuse WSD without `lr_wsd_decay_iters` or `_samples`, those without WSD, and one that does not fit."""
    optimizer = context.optimizer
    given = optimizer.lr_wsd_decay_iters or optimizer.lr_wsd_decay_samples
    if optimizer.lr_decay_style == "WSD" and not given:
        yield context.problem(
            f"{_O}.lr_decay_style", "needs lr_wsd_decay_iters (or lr_wsd_decay_samples), the length of the last part"
        )
    if given and optimizer.lr_decay_style != "WSD":
        name = "lr_wsd_decay_iters" if optimizer.lr_wsd_decay_iters else "lr_wsd_decay_samples"
        yield context.problem(f"{_O}.{name}", "has an effect with lr_decay_style WSD only", f"{_O}.lr_decay_style")
        return
    for unit, path, length in (
        ("iters", f"{_T}.training_iters", context.training.training_iters),
        ("samples", f"{_D}.train_samples", context.dataset.train_samples),
    ):
        last, end = optimizer[f"lr_wsd_decay_{unit}"], optimizer[f"lr_decay_{unit}"] or length
        warm_up = optimizer[f"lr_warmup_{unit}"] or (optimizer.lr_warmup_fraction or 0) * (end or 0)
        if last and end and last > end - warm_up:
            yield context.problem(
                f"{_O}.lr_wsd_decay_{unit}",
                f"must fit between the end of the warm-up, {warm_up:g}, and that of the decay, {end}",
                f"{_O}.lr_decay_{unit}" if optimizer[f"lr_decay_{unit}"] else path,
            )


@rule
def one_source_of_schedules(context):
    """Refuse `override_opt_param_scheduler` together with `use_checkpoint_opt_param_scheduler`."""
    override, use = f"{_O}.override_opt_param_scheduler", f"{_O}.use_checkpoint_opt_param_scheduler"
    optimizer = context.optimizer
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        yield context.problem(override, "contradicts use_checkpoint_opt_param_scheduler; keep one", use)


@rule
def weight_decay_has_one_course(context):
    """Refuse start and end values of a constant weight decay, and a changing one without an end or with a start above it."""
    optimizer = context.optimizer
    start, end = f"{_O}.start_weight_decay", f"{_O}.end_weight_decay"
    if optimizer.weight_decay_incr_style == "constant":
        for path in (start, end):
            if context.was_set(path) and context.value(path) != optimizer.weight_decay:
                yield context.problem(
                    path,
                    "differs from weight_decay though weight_decay_incr_style is constant",
                    f"{_O}.weight_decay",
                    f"{_O}.weight_decay_incr_style",
                )
        return
    if not context.was_set(end) and not context.was_set(f"{_O}.weight_decay"):
        yield context.problem(end, "must be given for a weight decay that changes", f"{_O}.weight_decay_incr_style")
    elif optimizer.start_weight_decay > optimizer.end_weight_decay:
        yield context.problem(start, "must not be above the weight decay at the end", end)


@rule
def two_betas(context):
    """Refuse `betas` that are not two numbers >= 0 and < 1."""
    betas = context.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield context.problem(f"{_O}.betas", "expects two numbers >= 0 and < 1")


@rule
def one_clipping(context):
    """Refuse different values of `training_config.grad_clip_kwargs` and `optimizer_config.clip_grad`."""
    kwargs, path = context.training.grad_clip_kwargs, f"{_O}.clip_grad"
    if kwargs and (context.optimizer.clip_grad, context.optimizer.clip_grad_type) != (kwargs.clip_value, kwargs.grad_clip_type):
        yield context.problem(f"{_T}.grad_clip_kwargs", "contradicts optimizer_config.clip_grad; keep one", path)
