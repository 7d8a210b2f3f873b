"""Rules over several fields: one function per rule; all problems are reported together."""

from mindspeed_ms.config.checks import (
    attention,
    effects,
    experts,
    layout,
    model,
    multi_token_prediction,
    optimizer,
    pipeline,
    posttrain,
    profile,
    refused,
    rollouts,
    training,
)
from mindspeed_ms.config.checks.rule import LAST_RULES, RULES, Context
from mindspeed_ms.config.errors import ConfigError


def check_all(all_config, settings):
    """Run every rule. Rules change nothing but the notices: `resolve` has filled derived values before.

    Args:
        all_config (AllConfig): configuration to check.
        settings (Settings): what the user set, for names and places.

    Raises:
        ConfigError: every problem that was found.
    """
    context = Context(all_config, settings)
    for rules in (RULES, LAST_RULES):
        problems = [problem for function in rules for problem in function(context)]
        if problems:
            raise ConfigError([settings.locate(problem) for problem in problems])
