"""Conversion of alpaca, sharegpt and openai records to conversations: user, assistant, observation and function turns."""

import json
from dataclasses import dataclass

from mindspeed_ms.core.datasets.tokenizer.chat_template import TemplateError
from mindspeed_ms.tasks.preprocess.errors import BadRecord, Unusable, column
from mindspeed_ms.tasks.preprocess.map_keys import Columns
from mindspeed_ms.tasks.preprocess.messages import (
    ANSWERING,
    ASKING,
    ASSISTANT,
    FUNCTION,
    OBSERVATION,
    SYSTEM,
    USER,
    misplaced,
    split_system,
    spoken,
)
from mindspeed_ms.tasks.preprocess.tool_formats import parse_calls

_CALLS = ("tool_calls", "function_call")  # the second is OpenAI's older word for one call
_OPTION = """--map-keys '{"%s":"KEY"}'"""


@dataclass(frozen=True)
class Conversation:
    """Conversation of one record.

    Attributes:
        messages (list[dict]): whole messages (see messages.py), questions and answers in turn.
        system, tools (Optional[str]): texts, None if the record has none.
    """

    messages: list
    system: str | None = None
    tools: str | None = None


class RecordReader:
    """Converts records to conversations.

    Args:
        style (str): "alpaca", "sharegpt" or "openai".
        map_keys (dict): checked `--map-keys`.
    """

    def __init__(self, style, map_keys):
        self.columns = Columns(style, map_keys)
        self._messages = self._alpaca_messages if style == "alpaca" else self._listed_messages
        self._is_alpaca = style == "alpaca"

    def check_first(self, records):
        """Raise BadRecord if a column that `--map-keys` names is in none of the first records of a file."""
        missing = self.columns.missing_from(records)
        if missing and records:
            key, name = missing
            found = ", ".join(map(repr, records[0]))
            raise BadRecord(
                f"--map-keys asks for the key {name!r} as {key}, but none of the first {len(records)} records has "
                f"it; found {found}.",
                f"key {name!r} is missing",
            )

    def conversation(self, record):
        """Conversation of a record, which ends with an answer.

        Raises:
            BadRecord: a key is missing or a value is of the wrong type.
            Unusable: the record is well formed but teaches nothing.
        """
        messages = self._messages(record)
        if self._is_alpaca:
            messages.append(_message(ASSISTANT, self._answer(record)))
        return self._checked(record, messages, answered=True)

    def prompt(self, record):
        """Conversation of a record that ends with its last question."""
        messages = self._messages(record)
        if messages and messages[-1]["role"] in ANSWERING:
            messages.pop()
        return self._checked(record, messages, answered=False)

    def pair(self, record):
        """(Conversation up to the last question, chosen answer, rejected answer); answers are messages."""
        messages = self._messages(record)
        chosen, rejected = (self._alternative(record, key) for key in ("chosen", "rejected"))
        conversation = self._checked(record, messages, answered=False)
        if chosen == rejected:
            raise BadRecord("both answers are the same, which says nothing about preference: leave it out", "equal answers")
        return conversation, chosen, rejected

    def _checked(self, record, listed, answered):
        system, messages = split_system(listed, None)
        if not any(message["role"] in ASKING and message["content"].strip() for message in messages):
            raise Unusable("no question")
        fault = misplaced(messages)
        if not fault and messages[-1]["role"] not in (ANSWERING if answered else ASKING):
            fault = len(messages) - 1, "the last message is no answer" if answered else "the last message is no question"
        if fault:
            index, rule = fault
            number = index + 1 + len(listed) - len(messages)  # as the record counts
            raise Unusable(rule, f"message {number} has the role {self._name(messages[index]['role'])!r}")
        if answered and not (spoken(messages[-1]).strip() or messages[-1].get("tool_calls")):
            raise Unusable("empty answer")
        given = self.columns.optional(record, "system")
        system = text_of(given, "system") or system
        tools = self.columns.optional(record, "tools")
        if tools is not None and not isinstance(tools, str):
            tools = json.dumps(tools, ensure_ascii=False)
        return Conversation(messages, system or None, tools or None)

    # Alpaca: one column for each part

    def _alpaca_messages(self, record):
        messages = []
        history = self.columns.optional(record, "history") or []
        if not isinstance(history, list | tuple):
            raise BadRecord(f"history must be a list of [question, answer], found {history!r:.80}", "history of another form")
        for turn in history:
            if not isinstance(turn, list | tuple) or len(turn) != 2:
                raise BadRecord(f"history must be a list of [question, answer], found {turn!r:.80}", "history of another form")
            messages += [_message(USER, text_of(turn[0], "history")), _message(ASSISTANT, text_of(turn[1], "history"))]
        parts = []
        if self.columns.name("prompt"):
            parts.append(self._required(record, "prompt", "the question"))
        parts.append(self.columns.optional(record, "query"))
        text = "\n".join(filter(None, (text_of(part, "the question") for part in parts)))
        if not text:
            raise Unusable("no question")
        return [*messages, _message(USER, text)]

    def _answer(self, record):
        answer = self._required(record, "response", "the answer")
        if isinstance(answer, list):
            if len(answer) != 1:
                raise Unusable(f"{len(answer)} answers instead of one")
            answer = answer[0]
        return text_of(answer, "the answer")

    def _required(self, record, key, purpose):
        name = self.columns.name(key)
        if not name:
            raise BadRecord(f'--map-keys switches off {key} (""), but {purpose} is needed', f"{key} is switched off")
        return column(record, name, purpose, _OPTION % key)

    # ShareGPT and OpenAI: a list of messages

    def _listed_messages(self, record):
        listed = self._required(record, "messages", "the messages")
        if not isinstance(listed, list) or not all(isinstance(message, dict) for message in listed):
            raise BadRecord(f"the messages must be a list of objects, found {listed!r:.80}", "messages of another form")
        return [self._read_message(message, number) for number, message in enumerate(listed, 1)]

    def _read_message(self, message, number):
        """Message in canonical roles with all its content; `number` counts the messages of the record."""
        tags = self.columns.tags
        role = column(message, tags["role_tag"], "the role of a message", """--map-keys '{"tags":{"role_tag":"KEY"}}'""")
        role = self._canonical(role, number)
        # parquet and arrow cannot tell an absent field from a null one, and many templates ask only whether it is there
        fields = {name: value for name, value in message.items() if value is not None and name not in _CALLS}
        if "reasoning_content" in fields:
            fields["reasoning_content"] = text_of(fields["reasoning_content"], "reasoning_content")
        calls = message.get("tool_calls") or message.get("function_call")
        if calls:
            if role not in ANSWERING:
                raise Unusable("calls of tools in a message that is no answer", f"message {number} ({self._name(role)!r})")
            text = text_of(message.get(tags["content_tag"]), "a message")
            return {**fields, **_message(FUNCTION, text), "tool_calls": _checked_calls(calls)}
        content = column(
            message, tags["content_tag"], "the text of a message", """--map-keys '{"tags":{"content_tag":"KEY"}}'"""
        )
        return {**fields, **_message(role, text_of(content, "a message"))}

    def _canonical(self, role, number):
        names = {self._name(canonical): canonical for canonical in (USER, ASSISTANT, OBSERVATION, FUNCTION, SYSTEM)}
        if self._name(SYSTEM):
            names.setdefault("developer", SYSTEM)  # OpenAI's newer word
        names.pop("", None)  # a tag that is switched off
        if not isinstance(role, str) or role not in names:
            raise Unusable(f"unknown role {role!r}, known: {', '.join(names)}", f"message {number}")
        return names[role]

    def _name(self, role):
        """Name that the records have for a canonical role."""
        return self.columns.tags.get(f"{role}_tag", role)

    def _alternative(self, record, key):
        value = self._required(record, key, f"the {key} answer")
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        is_message = isinstance(value, dict) and not self._is_alpaca
        message = self._read_message(value, 1) if is_message else _message(ASSISTANT, text_of(value, f"the {key} answer"))
        if message["role"] not in ANSWERING:
            raise Unusable(f"the {key} message is no answer")
        if not (spoken(message).strip() or message.get("tool_calls")):
            raise Unusable(f"empty {key} answer")
        return message


def text_of(value, purpose):
    """Text (str) of a value: "" for None, numbers written out.

    Raises:
        BadRecord: another type.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list) and value and all(_is_text_part(part) for part in value):
        return "".join(part["text"] for part in value)
    raise BadRecord(f"expected text for {purpose}, found {type(value).__name__}: {value!r:.80}", f"{purpose} is no text")


def _is_text_part(part):
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _message(role, content):
    return {"role": role, "content": content}


def _checked_calls(calls):
    """Checked tool calls (list[dict]) of a message, in the record's form.

    Raises:
        BadRecord: a call without a name, or arguments that are no json object.
    """
    try:
        parse_calls(calls)
    except TemplateError as error:
        raise BadRecord(str(error), "tool call of another form") from error
    calls = json.loads(calls) if isinstance(calls, str) else calls
    return calls if isinstance(calls, list) else [calls]
