"""`--map-keys`: column names of the input. Keys that are not given keep their default columns; "" switches a column off."""

from mindspeed_ms.spelling import did_you_mean
from mindspeed_ms.tasks.preprocess.errors import PreprocessError
from mindspeed_ms.tasks.preprocess.registry import HANDLER_KINDS

DEFAULT_COLUMNS = {
    "alpaca": {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "history": "history",
        "system": "system",
        "tools": "tools",
        "chosen": "chosen",
        "rejected": "rejected",
    },
    "sharegpt": {"messages": "conversations", "system": "system", "tools": "tools", "chosen": "chosen", "rejected": "rejected"},
    "openai": {"messages": "messages", "system": "system", "tools": "tools"},
    "process_reward": {"input": "input", "value": "value"},
}
DEFAULT_TAGS = {
    "sharegpt": {
        "role_tag": "from",
        "content_tag": "value",
        "user_tag": "human",
        "assistant_tag": "gpt",
        "observation_tag": "observation",
        "function_tag": "function_call",
        "system_tag": "system",
    },
    "openai": {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "observation_tag": "tool",
        "function_tag": "function_call",
        "system_tag": "system",
    },
}
_TAGS = "tags"


def check_map_keys(map_keys, handler_name):
    """Check `map_keys` and return it: keys must be known, values must be names.

    Args:
        map_keys (dict): parsed `--map-keys`.
        handler_name (str): a name of HANDLER_KINDS.

    Raises:
        PreprocessError: an unknown key (with the nearest known one), a value that is no text, the same column for two things.
    """
    style = HANDLER_KINDS[handler_name].style
    if style == "pretrain":
        raise PreprocessError(f"--map-keys has no meaning for {handler_name}: name the columns of a corpus with --json-keys.")
    known = DEFAULT_COLUMNS[style]
    for key, value in map_keys.items():
        if key == _TAGS and style in DEFAULT_TAGS:
            _check_tags(value, DEFAULT_TAGS[style])
        else:
            _check_entry("--map-keys", key, value, known)
    return map_keys


def _check_tags(tags, known):
    if not isinstance(tags, dict):
        raise PreprocessError(f"--map-keys: tags must be an object, found {tags!r}.")
    for key, value in tags.items():
        _check_entry("--map-keys, tags", key, value, known)


def _check_entry(place, key, value, known):
    if key not in known:
        raise PreprocessError(f"{place}: unknown key {key!r}.{did_you_mean(key, known)} Known: {', '.join(known)}.")
    if value is not None and not isinstance(value, str):
        raise PreprocessError(f'{place}: {key} must be the name of a column, or "" for none, found {value!r}.')


class Columns:
    """Column names of one style of records.

    Args:
        style (str): a key of DEFAULT_COLUMNS.
        map_keys (dict): checked `--map-keys`.

    Attributes:
        tags (dict): names of roles and of the fields of a message.
    """

    def __init__(self, style, map_keys):
        self._names = {**DEFAULT_COLUMNS[style], **{key: value for key, value in map_keys.items() if key != _TAGS}}
        self._given = {key for key, value in map_keys.items() if key != _TAGS and value}
        self.tags = {**DEFAULT_TAGS.get(style, {}), **(map_keys.get(_TAGS) or {})}

    def name(self, key):
        """Name of the column (str), "" if it is switched off."""
        return self._names.get(key) or ""

    def optional(self, record, key):
        """Value of a column in a record; None if the column is off or the record lacks it."""
        return record.get(self._names.get(key) or None)

    def missing_from(self, records):
        """First (key, column) of `--map-keys` that none of these records (list[dict]) has; None if there is none."""
        for key in sorted(self._given):
            if not any(self._names[key] in record for record in records):
                return key, self._names[key]
        return None
