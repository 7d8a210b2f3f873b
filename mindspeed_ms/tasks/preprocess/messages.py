"""Messages of a conversation: roles, and rounds of questions and answers.

A message is a dict of `role` and `content` (str), and of further entries of the record: `tool_calls`, `tool_call_id`, `name`,
`reasoning_content`, ... Templates decide which of them they write.
"""

import itertools

from mindspeed_ms.core.datasets.tokenizer.chat_template import TemplateError

USER, ASSISTANT, OBSERVATION, FUNCTION, SYSTEM = "user", "assistant", "observation", "function", "system"
ASKING, ANSWERING = (USER, OBSERVATION), (ASSISTANT, FUNCTION)
_ALTERNATE = "questions and answers do not alternate"


def misplaced(messages):
    """First message (list[dict]) out of order: (index, rule); None if there is none.

    Questions and answers alternate, a question first. Results of several tools may follow each other.
    """
    before = None
    for index, message in enumerate(messages):
        role = message["role"]
        if role == SYSTEM:
            return index, "a system message is not the first"
        if role not in ASKING + ANSWERING:
            return index, "unknown role"
        if before is None and role in ANSWERING:
            return index, f"{_ALTERNATE}: the first message is an answer"
        if before in ANSWERING and role in ANSWERING:
            return index, f"{_ALTERNATE}: two answers in a row"
        if before in ASKING and role in ASKING and not before == role == OBSERVATION:
            return index, f"{_ALTERNATE}: two questions in a row"
        before = role
    return None


def split_system(messages, system):
    """(system message or None, other messages); a given `system` (Optional[str]) wins over a first system message."""
    if messages and messages[0]["role"] == SYSTEM:
        return system or messages[0]["content"], messages[1:]
    return system, messages


def rounds(messages):
    """Rounds of a conversation: list of (questions, answer); questions (list[dict]) are several for results of tools.

    Raises:
        TemplateError: questions and answers do not alternate, or an answer is not last.
    """
    fault = misplaced(messages)
    if fault:
        index, rule = fault
        expected = ANSWERING if index and messages[index - 1]["role"] in ASKING else ASKING
        raise TemplateError(
            f"message {index + 1} has the role {messages[index]['role']!r}, expected {' or '.join(expected)}: {rule}."
        )
    if not messages or messages[-1]["role"] not in ANSWERING:
        raise TemplateError(
            f"a conversation has {len(messages)} messages, expected questions and answers in turn, and an answer last."
        )
    begins = [*round_begins(messages), len(messages)]
    return [(messages[begin : end - 1], messages[end - 1]) for begin, end in itertools.pairwise(begins)]


def round_begins(messages):
    """Indices (list[int]) of the messages that begin a round."""
    asking = [message["role"] in ASKING for message in messages]
    return [index for index, asks in enumerate(asking) if asks and not (index and asking[index - 1])]


def spoken(message):
    """Content (str) of a message, behind its separate thought if it has one."""
    thought = message.get("reasoning_content")
    return f"<think>\n{thought}\n</think>\n\n{message['content']}" if thought else message["content"]


def calls_of(message):
    """Calls of a function message: the record's list, or its content, which is json."""
    return message.get("tool_calls") or message["content"]
