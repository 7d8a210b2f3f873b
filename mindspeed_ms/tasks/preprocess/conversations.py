"""Conversion of alpaca, sharegpt and openai records to conversations: user, assistant, observation and function turns."""

import json
from dataclasses import dataclass

from mindspeed_ms.tasks.preprocess.errors import BadRecord, Unusable, column
from mindspeed_ms.tasks.preprocess.map_keys import Columns

USER, ASSISTANT, OBSERVATION, FUNCTION, SYSTEM = "user", "assistant", "observation", "function", "system"
_ASKING, _ANSWERING = (USER, OBSERVATION), (ASSISTANT, FUNCTION)
BESIDE_CALLS = "texts of messages that also call tools were left out (the calls are kept)"
_OPTION = """--map-keys '{"%s":"KEY"}'"""


@dataclass(frozen=True)
class Conversation:
    """One record.

    Attributes:
        messages (list[dict]): {"role", "content"}, asking and answering roles in turn, from a user on.
        system, tools (Optional[str]): texts, None if the record has none.
        notes (tuple[str]): parts of the record that are not in it, in words for the report.
    """

    messages: list
    system: str | None = None
    tools: str | None = None
    notes: tuple = ()


class RecordReader:
    """Makes conversations of records.

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
        """Conversation of a record that ends with its answer.

        Raises:
            BadRecord: a key is missing or a value is of the wrong type.
            Unusable: the record is well formed but teaches nothing.
        """
        messages, system, notes = self._messages(record)
        if self._is_alpaca:
            messages.append(_message(ASSISTANT, self._answer(record)))
        return self._checked(record, messages, system, notes, answered=True)

    def prompt(self, record):
        """Conversation of a record up to its last question."""
        messages, system, notes = self._messages(record)
        if messages and messages[-1]["role"] in _ANSWERING:
            messages.pop()
        return self._checked(record, messages, system, notes, answered=False)

    def pair(self, record):
        """(Conversation up to the last question, chosen answer, rejected answer); answers are messages."""
        messages, system, notes = self._messages(record)
        chosen, rejected = (self._alternative(record, key, notes) for key in ("chosen", "rejected"))
        return self._checked(record, messages, system, notes, answered=False), chosen, rejected

    def _checked(self, record, messages, system, notes, answered):
        if not any(message["role"] in _ASKING and message["content"].strip() for message in messages):
            raise Unusable("no question")
        if len(messages) % 2 != (0 if answered else 1):
            raise Unusable("the last message is no answer" if answered else "the last message is no question")
        for number, message in enumerate(messages):
            if message["role"] not in (_ANSWERING if number % 2 else _ASKING):
                raise Unusable("questions and answers do not alternate")
        if answered and not messages[-1]["content"].strip():
            raise Unusable("empty answer")
        given = self.columns.optional(record, "system")
        system = text_of(given, "system") or system
        tools = self.columns.optional(record, "tools")
        if tools is not None and not isinstance(tools, str):
            tools = json.dumps(tools, ensure_ascii=False)
        return Conversation(messages, system or None, tools or None, tuple(notes))

    # Alpaca: one column for each part

    def _alpaca_messages(self, record):
        messages = []
        for turn in self.columns.optional(record, "history") or []:
            if not isinstance(turn, list | tuple) or len(turn) != 2:
                raise BadRecord(f"history must be a list of [question, answer], found {turn!r:.80}", "history of another form")
            messages += [_message(USER, text_of(turn[0], "history")), _message(ASSISTANT, text_of(turn[1], "history"))]
        parts = []
        if self.columns.name("prompt"):
            parts.append(self._required(record, "prompt", "the question"))
        parts.append(self.columns.optional(record, "query"))
        text = "\n".join(filter(None, (text_of(part, "the question") for part in parts)))
        return messages + ([_message(USER, text)] if text else []), None, []

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
        messages, system, notes = [], None, []
        for number, message in enumerate(listed):
            read = self._read_message(message, notes)
            if number == 0 and read["role"] == SYSTEM:
                system = read["content"]
            else:
                _append(messages, read)
        return messages, system, notes

    def _read_message(self, message, notes):
        """A message in canonical form; where it calls tools, the calls alone: a text beside them goes to `notes` (list)."""
        tags = self.columns.tags
        role = column(message, tags["role_tag"], "the role of a message", """--map-keys '{"tags":{"role_tag":"KEY"}}'""")
        calls = message.get("tool_calls")
        if calls:
            beside = message.get(tags["content_tag"]) or message.get("reasoning_content") or ""
            if str(beside).strip():
                notes.append(BESIDE_CALLS)
            return _message(FUNCTION, _calls_text(calls))
        content = column(
            message, tags["content_tag"], "the text of a message", """--map-keys '{"tags":{"content_tag":"KEY"}}'"""
        )
        return _message(self._canonical(role), _with_reasoning(message, text_of(content, "a message")))

    def _canonical(self, role):
        tags = self.columns.tags
        names = {
            tags["user_tag"]: USER,
            tags["assistant_tag"]: ASSISTANT,
            tags["observation_tag"]: OBSERVATION,
            tags["function_tag"]: FUNCTION,
            tags["system_tag"]: SYSTEM,
        }
        names.pop("", None)  # a tag that is switched off
        if role not in names:
            raise Unusable(f"unknown role {role!r}, known: {', '.join(names)}")
        return names[role]

    def _alternative(self, record, key, notes):
        value = self._required(record, key, f"the {key} answer")
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        message = self._read_message(value, notes) if isinstance(value, dict) else _message(ASSISTANT, text_of(value, key))
        if message["role"] not in _ANSWERING:
            raise Unusable(f"the {key} message is no answer")
        if not message["content"].strip():
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
    if isinstance(value, list) and value and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "".join(part["text"] for part in value)
    raise BadRecord(f"expected text for {purpose}, found {type(value).__name__}: {value!r:.80}", f"{purpose} is no text")


def _message(role, content):
    return {"role": role, "content": content}


def _append(messages, message):
    """Results of several tools that were called together are one turn."""
    if messages and message["role"] == OBSERVATION == messages[-1]["role"]:
        messages[-1] = _message(OBSERVATION, messages[-1]["content"] + "\n" + message["content"])
    else:
        messages.append(message)


def _calls_text(calls):
    """JSON of {"name", "arguments"}, or of a list of them."""
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            raise BadRecord(f"a call of a tool needs a name and arguments, found {call!r:.80}", "tool call of another form")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except json.JSONDecodeError as error:
                raise BadRecord(
                    f"the arguments of the call of {function['name']} are broken JSON: {arguments!r:.80}",
                    "tool call of another form",
                ) from error
        found.append({"name": function["name"], "arguments": arguments})
    return json.dumps(found[0] if len(found) == 1 else found, ensure_ascii=False)


def _with_reasoning(message, content):
    reasoning = message.get("reasoning_content")
    return f"<think>\n{text_of(reasoning, 'reasoning_content')}\n</think>\n\n{content}" if reasoning else content
