"""The 38BV3 trio of the guide (train_config, accelerate_config, model_config.llm) as settings."""

from mindspeed_ms.config.errors import Problem
from mindspeed_ms.config.settings import TRIO_SECTIONS, Settings, add_section, nested_settings
from mindspeed_ms.config.trio_table import FUSED_RMSNORM, SECTION_KEYS, SPELLINGS, TRIO
from mindspeed_ms.spelling import did_you_mean

_FOLDERS = {
    ".".join(words[:size]) for words in (key.split(".") for key in (*TRIO, *SECTION_KEYS)) for size in range(1, len(words))
}


def is_trio(data):
    """True if the data of a file has a part of the trio (beside nested sections, or alone)."""
    model = data.get("model_config")
    return any(name in data for name in TRIO_SECTIONS) or (isinstance(model, dict) and "llm" in model)


def trio_settings(document):
    """Settings of a file with parts of the trio; sections in the nested form may be beside them.

    Args:
        document (Document): one file.

    Returns:
        Settings: with the problems found: unknown keys, values that cannot be translated, contradictions.
    """
    reader = _TrioReader(document)
    rest = {}
    for name, value in document.data.items():
        if name in TRIO_SECTIONS:
            reader.walk((name,), value)
        elif name == "model_config" and isinstance(value, dict) and "llm" in value:
            reader.walk((name, "llm"), value["llm"])
            beside = {key: item for key, item in value.items() if key != "llm"}
            rest |= {name: beside} if beside else {}
        else:
            rest[name] = value
    beside = nested_settings(rest, document.places, document.name)
    for path, setting in beside.by_path.items():
        reader.add(path, setting.value, setting.key, setting.place)
    reader.settings.problems += beside.problems
    reader.settings.general.update(beside.general)
    return reader.settings


class _TrioReader:
    def __init__(self, document):
        self.document = document
        self.settings = Settings()

    def place(self, keys):
        return self.document.places.get(keys, self.document.name)

    def walk(self, keys, value):
        path = ".".join((*keys[:-1], SPELLINGS.get(keys[-1], keys[-1])))
        if path in SECTION_KEYS:
            self.section(keys, SECTION_KEYS[path], value)
        elif path in TRIO:
            self.leaf(keys, TRIO[path], value)
        elif path not in _FOLDERS:
            siblings = {
                key[len(path.rpartition(".")[0]) + 1 :].split(".")[0]
                for key in (*TRIO, *SECTION_KEYS)
                if key.startswith(path.rpartition(".")[0] + ".")
            }
            self.complain(
                keys, f"is no key of the trio; there are {', '.join(sorted(siblings))}.{did_you_mean(keys[-1], siblings)}"
            )
        elif isinstance(value, dict):
            for name, item in value.items():
                self.walk((*keys, str(name)), item)
        elif value is not None:
            self.complain(keys, "expects keys below it", value)

    def section(self, keys, name, value):
        if value is None:
            return
        if not isinstance(value, dict):
            self.complain(keys, "expects keys below it", value)
            return
        inner = Settings()
        add_section(inner, name, value, keys, self.place)
        for path, setting in inner.by_path.items():
            if setting.value is not None:
                self.add(path, setting.value, setting.key, setting.place)
        self.settings.problems += inner.problems

    def leaf(self, keys, trio_key, value):
        if value is None or value == "":
            return
        try:
            changes = trio_key.settings(value)
        except ValueError as error:
            self.complain(keys, str(error), value)
            return
        for path, item in changes.items():
            self.add(path, item, ".".join(keys), self.place(keys))

    def add(self, path, value, key, place):
        before = self.settings.by_path.get(path)
        if before is not None and before.value != value:
            what = "the fused rmsnorm" if path == FUSED_RMSNORM else path
            self.settings.problems.append(
                Problem(key, f"sets {what} to {value!r}, but {before.key} sets it to {before.value!r}; keep one", value, place)
            )
        self.settings.add(path, value, key, place)

    def complain(self, keys, message, *value):
        self.settings.problems.append(Problem(".".join(keys), message, *value, place=self.place(keys)))
