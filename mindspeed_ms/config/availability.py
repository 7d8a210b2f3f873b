"""What is in the schema but does not run yet: one table, refused when a run starts."""

from dataclasses import dataclass

from mindspeed_ms.config.errors import ConfigError, Problem


@dataclass(frozen=True)
class Missing:
    """A feature that does not run yet.

    Args:
        path: config path that asks for it, with any value but the guide's default.
        feature: what it is called in the message.
        parts: prefixes of the paths that belong to the feature and have no effect without it.
    """

    path: str
    feature: str
    parts: tuple = ()

    def asked(self, all_config):
        """True if ``all_config`` asks for the feature."""
        section, name = self.path.split(".")
        holder = getattr(all_config, section)
        if holder is None:
            return False
        settings = all_config.settings
        only_megatron = settings is not None and self.path in settings.by_path and not settings.was_set(self.path)
        default = type(holder).own_fields()[name].get_default(call_default_factory=True)
        return getattr(holder, name) != default and not only_megatron


# a feature that comes takes its line out
NOT_YET = (
    Missing("parallel_config.context_parallel_size", "context parallelism"),
    Missing("parallel_config.expert_model_parallel_size", "expert parallelism"),
    Missing("moe_config.num_experts", "a mixture of experts", parts=("moe_config.",)),
    Missing("lora_config.use_lora", "low-rank adapters", parts=("lora_config.",)),
    Missing("optimizer_config.reuse_fp32_param", "shared storage of bf16 and fp32 parameters"),
    Missing("model_config.rope_scaling", "scaling of rotary frequencies", parts=("model_config.rope_scaling.",)),
    Missing("model_config.qk_layernorm", "norms of queries and keys"),
    Missing("training_config.best_metric_comparison", "keeping the best checkpoint", parts=("training_config.eval_metric",)),
    Missing("optimizer_config.overlap_param_gather_with_optimizer_step", "gathering parameters during the update"),
    Missing("training_config.loss_reduction", "a loss that is summed"),
)


def missing_features(all_config):
    """The lines of the table that ``all_config`` asks for: list of (Missing, value)."""
    return [
        (entry, getattr(getattr(all_config, entry.path.split(".")[0]), entry.path.split(".")[1]))
        for entry in NOT_YET
        if entry.asked(all_config)
    ]


def require_available(all_config):
    """Called when a run starts; checking a configuration does not call it.

    Args:
        all_config (AllConfig): what is to run.

    Raises:
        ConfigError: every feature that is asked for and does not run yet.
    """
    problems = [
        Problem(entry.path, f"{entry.feature} is not available yet; leave it at its default", value)
        for entry, value in missing_features(all_config)
    ]
    if all_config.training_config.use_checkpoint_args and all_config.settings is None:
        message = "comes too late for a model_config that was made by hand; use init_configs_from_yaml, _dict or _args"
        problems.append(Problem("training_config.use_checkpoint_args", message, True))
    if all_config.model_config is None:
        problems.append(Problem("model_config", "is missing: give the model's size"))
    if problems:
        raise ConfigError(problems)
