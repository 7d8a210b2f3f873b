"""What is in the schema but does not run yet: one table, refused when a run starts."""

from dataclasses import dataclass

from mindspeed_ms.config.errors import ConfigError, Problem


@dataclass(frozen=True)
class Missing:
    """A feature that does not run yet.

    Args:
        path: config path that asks for it.
        feature: what it is called in the message.
        above: largest value that runs, for sizes; None if only the default does.
    """

    path: str
    feature: str
    above: int | None = None

    def asked(self, value):
        """True if ``value`` asks for the feature."""
        if self.above is not None:
            return value is not None and value > self.above
        return bool(value)


# a feature that comes takes its line out
NOT_YET = (
    Missing("parallel_config.pipeline_model_parallel_size", "pipeline parallelism", above=1),
    Missing("parallel_config.context_parallel_size", "context parallelism", above=1),
    Missing("parallel_config.expert_model_parallel_size", "expert parallelism", above=1),
    Missing("moe_config.num_experts", "a mixture of experts", above=1),
    Missing("lora_config.use_lora", "low-rank adapters"),
    Missing("training_config.use_distributed_optimizer", "the distributed optimizer"),
    Missing("parallel_config.zero_level", "ZeRO sharding"),
    Missing("optimizer_config.optimizer_cpu_offload", "optimizer state on the host"),
    Missing("optimizer_config.reuse_fp32_param", "shared storage of bf16 and fp32 parameters"),
    Missing("model_config.recompute_granularity", "recomputation"),
    Missing("parallel_config.recompute", "recomputation"),
    Missing("parallel_config.select_recompute", "selective recomputation"),
    Missing("parallel_config.select_comm_recompute", "recomputation of communication"),
    Missing("parallel_config.noop_layers", "no-op layers"),
    Missing("parallel_config.variable_seq_lengths", "batches of different length"),
    Missing("model_config.rope_scaling", "scaling of rotary frequencies"),
    Missing("model_config.qk_layernorm", "norms of queries and keys"),
    Missing("training_config.profile", "profiling"),
    Missing("training_config.async_save", "asynchronous saving"),
    Missing("training_config.non_persistent_save_interval", "checkpoints that replace each other"),
    Missing("training_config.best_metric_comparison", "keeping the best checkpoint"),
    Missing("training_config.use_checkpoint_args", "taking the model's shape from a checkpoint"),
)


def missing_features(all_config):
    """The lines of the table that ``all_config`` asks for: list of (Missing, value)."""
    found = []
    for entry in NOT_YET:
        section, field = entry.path.split(".")
        holder = getattr(all_config, section)
        if holder is not None and entry.asked(getattr(holder, field)):
            found.append((entry, getattr(holder, field)))
    return found


def require_available(all_config):
    """Called when a run starts; checking a configuration does not call it.

    Args:
        all_config (AllConfig): what is to run.

    Raises:
        ConfigError: every feature that is asked for and does not run yet.
    """
    problems = [Problem(entry.path, f"{entry.feature} is not available yet; leave it at its default", value)
                for entry, value in missing_features(all_config)]
    if all_config.model_config is None:
        problems.append(Problem("model_config", "is missing: give the model's size"))
    if problems:
        raise ConfigError(problems)
