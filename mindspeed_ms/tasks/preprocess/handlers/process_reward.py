"""Handler of process rewards: a text whose steps end with a placeholder, and a label for each step."""

from mindspeed_ms.tasks.preprocess.conversations import text_of
from mindspeed_ms.tasks.preprocess.errors import BadRecord, PreprocessError, Unusable, column
from mindspeed_ms.tasks.preprocess.handlers.base import IGNORED_LABEL, RecordHandler
from mindspeed_ms.tasks.preprocess.map_keys import Columns

_OPTION = """--map-keys '{"%s":"KEY"}'"""


class ProcessRewardHandler(RecordHandler):
    """Handler of process rewards: a step's label is stored at its placeholder, everything else is masked. Nothing is cut."""

    keys = ("input_ids", "attention_mask", "labels")

    def __init__(self, settings, tokenizer):
        super().__init__(settings, tokenizer)
        self._columns = Columns("process_reward", settings.map_keys)
        self._placeholder = self._single("--placeholder-token", settings.placeholder_token)
        self._rewards = {token: self._single("--reward-tokens", token) for token in settings.reward_tokens}

    def _single(self, option, token):
        ids = self.tokenizer.tokenize(token, add_special_tokens=False)
        if len(ids) != 1:
            raise PreprocessError(
                f"{option} {token!r} is {len(ids)} tokens ({ids}) of {self.tokenizer.name}: expected one "
                "that is a single token."
            )
        return ids[0]

    def sample(self, record, note):
        """See RecordHandler."""
        text = text_of(column(record, self._columns.name("input"), "the steps", _OPTION % "input"), "the steps")
        values = column(record, self._columns.name("value"), "the labels", _OPTION % "value")
        ids = self.tokenizer.tokenize(text, add_special_tokens=False)
        steps = [position for position, number in enumerate(ids) if number == self._placeholder]
        if not isinstance(values, list) or len(values) != len(steps):
            count = len(values) if isinstance(values, list) else type(values).__name__
            raise BadRecord(
                f"expected a list of one label for each of the {len(steps)} placeholders "
                f"{self.settings.placeholder_token!r}, found {count}",
                "labels and placeholders differ",
            )
        if not steps:
            raise Unusable("no placeholder")
        if self.settings.seq_length and len(ids) > self.settings.seq_length:
            raise Unusable("longer than --seq-length")
        labels = [IGNORED_LABEL] * len(ids)
        for position, value in zip(steps, values):
            labels[position] = self._label(text_of(value, "a label"))
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}

    def _label(self, value):
        if value in self._rewards:
            return self._rewards[value]
        if self._rewards:
            raise BadRecord(
                f"the label {value!r} is not among --reward-tokens: {', '.join(map(repr, self._rewards))}", "unknown label"
            )
        ids = self.tokenizer.tokenize(value, add_special_tokens=False)
        if len(ids) != 1:
            raise BadRecord(f"the label {value!r} is {len(ids)} tokens, expected one", "label of several tokens")
        return ids[0]
