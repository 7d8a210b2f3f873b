"""Slots of a chat template: the pieces of text and single tokens that make up a turn.

A slot is a string with placeholders, `{"token": "<x>"}` (one id), or `["bos_token"]` / `["eos_token"]` (the tokenizer's id;
left out if it has none). Every string slot is encoded by a call of its own: what meets at a border never merges.
"""

import json
import re

from mindspeed_ms.core.datasets.tokenizer.chat_template import TemplateError
from mindspeed_ms.tasks.preprocess.tool_formats import TOOL_FORMATS, parse_calls

PLACEHOLDER = re.compile(r"\{\{(content|idx|name|arguments)\}\}")
_ROLES = ("bos_token", "eos_token")
_TAGGED = re.compile(r"<(?P<name>\w+)>(?P<before>\s*)\{\{content\}\}(?P<after>\s*)</(?P=name)>")


class Slots:
    """Slots of one format of a template, such as `format_user`.

    Args:
        slots (list): see the module.
        where (str): template and key, for messages.
        allowed (tuple[str]): placeholders that are filled, of which at least one must be there; empty: none may.

    Raises:
        TemplateError: a slot of another kind, a missing or misplaced placeholder.
    """

    def __init__(self, slots, where, allowed=("content", "idx")):
        self.slots, self.where = slots, where
        if not isinstance(slots, list):
            raise TemplateError(f"{where}: slots is {slots!r:.60}, expected a list.")
        for slot in slots:
            if not (isinstance(slot, str) or _is_token(slot) or _is_role(slot)):
                raise TemplateError(
                    f'{where}: slot {slot!r:.60} is no string, no {{"token": ...}} and no ["bos_token"] or ["eos_token"].'
                )
        found = {name for slot in slots if isinstance(slot, str) for name in PLACEHOLDER.findall(slot)}
        if not found <= set(allowed):
            raise TemplateError(f"{where}: nothing is put in for {{{{{min(found - set(allowed))}}}}} here.")
        if allowed and not found:
            raise TemplateError(f"{where}: no slot has {{{{{allowed[0]}}}}}, so the turn's text would be lost.")

    def fill(self, **values):
        """Slots with their placeholders replaced (str values by name)."""
        return [PLACEHOLDER.sub(lambda match: values[match[1]], slot) if isinstance(slot, str) else slot for slot in self.slots]

    def join(self, contents):
        """Join several contents: each in its own copy of the surrounding tag, or one per line without a tag."""
        for slot in self.slots:
            tag = _TAGGED.search(slot) if isinstance(slot, str) else None
            if tag:
                return f"{tag['after']}</{tag['name']}>\n<{tag['name']}>{tag['before']}".join(contents)
        return "\n".join(contents)

    @property
    def ends_with_text(self):
        """Whether an end token or fixed text follows the content."""
        last = self.slots[-1] if self.slots else ""
        return not isinstance(last, str) or not re.search(r"\{\{\w+\}\}$", last)

    def tokens(self):
        """Single tokens that the slots name."""
        return [slot["token"] for slot in self.slots if isinstance(slot, dict)]


class FunctionSlots(Slots):
    """Slots of `format_function`: the calls of a function turn.

    Args:
        tool_format (str): key of TOOL_FORMATS.
    """

    def __init__(self, slots, where, tool_format):
        self.format = tool_format_of(tool_format, where)
        super().__init__(slots, where, ("name", "arguments") if self.format.calls_text is None else ("content",))

    def fill(self, content):
        """Filled slots of calls (see parse_calls), one after the other."""
        calls = parse_calls(content)
        if self.format.calls_text is not None:
            return super().fill(content=self.format.calls_text(calls))
        filled = []
        for name, arguments in calls:
            filled += super().fill(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
        return filled


def tool_format_of(name, where):
    """ToolFormat by name.

    Raises:
        TemplateError: there is none.
    """
    if name not in TOOL_FORMATS:
        raise TemplateError(f"{where}: tool_format is {name!r}, expected one of {', '.join(TOOL_FORMATS)}.")
    return TOOL_FORMATS[name]


def encode_slots(tokenizer, turns):
    """Ids (list[list[int]]) of the filled slots of several turns, from one call of the tokenizer.

    Raises:
        TemplateError: a single token that the tokenizer lacks.
    """
    texts = iter(
        tokenizer.encode_batch(
            [slot for turn in turns for slot in turn if isinstance(slot, str) and slot], add_special_tokens=False
        )
    )
    return [[number for slot in turn if slot for number in _ids(tokenizer, slot, texts)] for turn in turns]


def _ids(tokenizer, slot, texts):
    if isinstance(slot, str):
        return next(texts)
    if isinstance(slot, dict):
        return [single_token(tokenizer, slot["token"])]
    number = tokenizer.bos if slot == ["bos_token"] else tokenizer.eos
    return [] if number is None else [number]


def single_token(tokenizer, token):
    """Id of a template's single token.

    Raises:
        TemplateError: the tokenizer lacks it.
    """
    number = tokenizer.token_to_id(token)
    if number is None:
        raise TemplateError(
            f"the template needs the token {token!r}, which {tokenizer.name} does not have: use the tokenizer "
            "of the model that the template is for, or another --prompt-type."
        )
    return number


def _is_token(slot):
    return isinstance(slot, dict) and set(slot) == {"token"} and isinstance(slot["token"], str)


def _is_role(slot):
    return isinstance(slot, list) and len(slot) == 1 and slot[0] in _ROLES
