"""The configuration classes under upstream's names: seven sections and AllConfig, which holds them."""

import copy
from functools import cache

from mindspeed_ms.config.errors import ConfigError, Problem
from mindspeed_ms.config.printing import settings_text, to_yaml
from mindspeed_ms.config.sections.base import nested_section
from mindspeed_ms.config.sections.dataset import DatasetConfig
from mindspeed_ms.config.sections.lora import LoraConfig
from mindspeed_ms.config.sections.model import TransformerConfig
from mindspeed_ms.config.sections.moe import MoEConfig
from mindspeed_ms.config.sections.optimizer import OptimizerConfig
from mindspeed_ms.config.sections.parallel import ModelParallelConfig
from mindspeed_ms.config.sections.training import TrainingConfig
from mindspeed_ms.spelling import did_you_mean

# in the order in which they are built: each needs only those before it
SECTIONS = {
    section.config_name: section
    for section in (
        ModelParallelConfig,
        DatasetConfig,
        LoraConfig,
        MoEConfig,
        TrainingConfig,
        OptimizerConfig,
        TransformerConfig,
    )
}


@cache
def field_info(path):
    """The pydantic FieldInfo at `section.field` or `section.field.key`; None if there is no such field."""
    section, *fields = path.split(".")
    kind, info = SECTIONS.get(section), None
    for name in fields:
        info = kind.own_fields().get(name) if kind is not None else None
        kind = nested_section(info) if info is not None else None
    return info


def all_fields():
    """(path, pydantic FieldInfo) of every field of every section."""
    for name, kind in SECTIONS.items():
        yield from ((f"{name}.{field}", info) for field, info in kind.own_fields().items())


class GeneralConfig(dict):
    """`general_config`: free keys of the user, readable as attributes; a missing one reads as None."""

    config_name = "general_config"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.get(name)
        return GeneralConfig(value) if type(value) is dict else value

    def __setattr__(self, name, value):
        self[name] = value


class AllConfig:
    """All sections of one run.

    Attributes: `model_config` (None if no model was given), `training_config`, `dataset_config`,
    `optimizer_config`, `parallel_config`, `moe_config`, `lora_config`, `general_config`. Sections are shared:
    `all_config.model_config.parallel_config is all_config.parallel_config`.

    Args:
        sections: sections by name; those not given are taken from the given ones that hold them, or get their defaults.

    Raises:
        ConfigError: for an unknown section, or one of another class.
    """

    config_name = "all_config"

    def __init__(self, **sections):
        problems = [
            Problem(name, f"is no section; there are {', '.join(SECTIONS)}.{did_you_mean(name, SECTIONS)}")
            for name in sections
            if name not in (*SECTIONS, "general_config")
        ]
        problems += [
            Problem(name, f"expects a {kind.__name__}", sections[name])
            for name, kind in SECTIONS.items()
            if sections.get(name) is not None and not isinstance(sections[name], kind)
        ]
        if problems:
            raise ConfigError(problems)
        given = {name: section for name, section in sections.items() if section is not None}
        self.general_config = GeneralConfig(given.pop("general_config", {}))
        self.model_config = given.get("model_config")
        self._adopt(given)
        # where each value comes from: {"section.field": "file:line" | "command line" | ...}, only if no default
        self.provenance = {}
        # everything that was set (config.settings.Settings); None if the sections were made by constructors
        self.settings = None
        # what the user should know though it is no error
        self.notices = []

    def _adopt(self, given):
        holders = [given[name] for name in ("model_config", "training_config", "optimizer_config") if name in given]
        for name, kind in SECTIONS.items():
            if name == "model_config":
                continue
            held = next((getattr(holder, name) for holder in holders if name in kind_links(holder)), None)
            setattr(self, name, given.get(name) or held or kind())
        for holder in (self.model_config, self.training_config, self.optimizer_config):
            for name in kind_links(holder) if holder is not None else ():
                holder.__dict__[name] = getattr(self, name)

    def sections(self):
        """dict name -> section, in the order of SECTIONS; no model_config if there is none."""
        return {name: getattr(self, name) for name in SECTIONS if getattr(self, name) is not None}

    def to_dict(self):
        """Nested dict of every setting, as `init_configs_from_dict` reads it."""
        result = {name: section.to_dict() for name, section in self.sections().items()}
        if self.general_config:
            result["general_config"] = copy.deepcopy(dict(self.general_config))
        return result

    def to_yaml(self, path=None):
        """Yaml text of every setting (written to `path` too if given); it reads back to an equal AllConfig."""
        return to_yaml(self, path)

    def __eq__(self, other):
        return isinstance(other, AllConfig) and self.to_dict() == other.to_dict()

    __hash__ = None

    def __repr__(self):
        return f"AllConfig({', '.join(f'{name}={section!r}' for name, section in self.sections().items())})"

    def __str__(self):
        return settings_text(self)


def kind_links(section):
    """Names of the other sections that `section` refers to."""
    return [name for name in type(section).model_fields if name not in type(section).own_fields()]
