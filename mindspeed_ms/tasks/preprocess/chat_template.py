"""ChatTemplate: a tokenizer's jinja template, rendered in a sandbox; get_template: the template of `--prompt-type`."""

import difflib
import itertools
import json
from dataclasses import replace

from mindspeed_ms.core.datasets.tokenizer.chat_template import JinjaTemplate, TemplateError
from mindspeed_ms.tasks.preprocess.answer_spans import answer_pieces
from mindspeed_ms.tasks.preprocess.messages import FUNCTION, OBSERVATION, calls_of, rounds, split_system, spoken
from mindspeed_ms.tasks.preprocess.templates import DEFAULT_TEMPLATES, FROM_TOKENIZER, Template, load_templates
from mindspeed_ms.tasks.preprocess.tool_formats import parse_arguments, parse_calls, parse_tools

_MISSING = (
    f"--prompt-type {FROM_TOKENIZER} needs a chat template in the tokenizer's folder, but {{place}}: name a template of "
    "templates.json instead."
)
_ROLES = {OBSERVATION: "tool", FUNCTION: "assistant"}
_GIVEN, _OBJECT, _TEXT = "as given", "object", "text"
# arguments of calls, and what the content is where a message only calls: templates expect one or the other
_FORMS = tuple(itertools.product((_GIVEN, _OBJECT, _TEXT), ("", None)))


def get_template(name, path=None, enable_thinking=None, tokenizer=None):
    """The template of a name.

    Args:
        name (str): a name in the file, or `chat_template` for the jinja template in the tokenizer's folder.
        path (Optional[str]): a templates.json; default: the package's.
        enable_thinking (Optional[bool]): see Template.
        tokenizer (Optional[Tokenizer]): needed for `chat_template`.

    Returns:
        Template, or a ChatTemplate with the same methods

    Raises:
        TemplateError: unknown name (with the nearest ones), a file that is missing or wrong.
    """
    if name == FROM_TOKENIZER:
        return ChatTemplate(tokenizer, enable_thinking)
    templates = load_templates(path)
    if name not in templates:
        known = [*templates, FROM_TOKENIZER]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(known)}."
        raise TemplateError(f"--prompt-type is {name!r}, which is not in {path or DEFAULT_TEMPLATES}: {hint}")
    template = templates[name]
    return template if enable_thinking is None else replace(template, enable_thinking=enable_thinking)


class ChatTemplate(JinjaTemplate):
    """Template of a tokenizer's folder (`tokenizer_config.json` or `chat_template.jinja`), with the methods of Template.

    The text is that of the whole conversation, each message with all that the record says of it. Answers are found in it by
    rendering the conversation up to each of them, and are learnt with their end token.

    Args:
        tokenizer (Tokenizer): with a chat_template.
        enable_thinking (Optional[bool]): handed to the template, which may heed it.

    Raises:
        TemplateError: there is no template, or jinja cannot read it.
    """

    name = FROM_TOKENIZER
    stop_words = ()
    efficient_eos = replace_eos = False
    answers_end = True
    template_class = "ReasoningTemplate"

    def __init__(self, tokenizer, enable_thinking=None):
        super().__init__(tokenizer, enable_thinking, _MISSING)
        sources = [tokenizer.chat_template, tokenizer.tool_chat_template or tokenizer.chat_template]
        self._knows_reasoning = ["reasoning_content" in source for source in sources]

    @staticmethod
    def to_json(value, *arguments, **options):
        """See JinjaTemplate; arguments of calls that are text are refused, they would be quoted twice."""
        _refuse_text_arguments(value)
        return JinjaTemplate.to_json(value, *arguments, **options)

    def encode_multiturn(self, tokenizer, messages, system=None, tools=None):
        """See Template.

        Raises:
            TemplateError: also if the template does not write an answer or a call of a tool, or changes the text before an
                answer once the answer follows.
        """
        system, messages = split_system(messages, system)
        rounds(messages)
        before = [{"role": "system", "content": system}] if system else []
        tools = [{"type": "function", "function": tool} for tool in parse_tools(tools)] if tools else None
        calling = any(message["role"] == FUNCTION for message in messages)
        refused = None
        for form in _FORMS if calling else _FORMS[:1]:
            try:
                pieces = answer_pieces(self.render, before, [self._message(m, tools, *form) for m in messages], tools)
                break
            except TemplateError as error:
                if refused is None or isinstance(refused.__cause__, _OtherForm):
                    refused = error
        else:
            raise refused
        ids = tokenizer.encode_batch([text for piece in pieces for text in piece], add_special_tokens=False)
        return list(zip(ids[::2], ids[1::2]))

    ids_and_labels = Template.ids_and_labels

    def left_out(self, messages):
        """Empty list: messages are passed to the template whole."""
        return []

    def _message(self, message, tools, arguments, no_content):
        """Convert a message to Hugging Face's form."""
        role, message = message["role"], dict(message)
        if role == FUNCTION:
            calls = calls_of(message)
            parse_calls(calls)
            if "tool_calls" not in message:
                calls, message["content"] = json.loads(calls), ""
            message["tool_calls"] = [_call(call, arguments) for call in (calls if isinstance(calls, list) else [calls])]
        if not self._knows_reasoning[bool(tools)]:
            message["content"] = spoken(message)
            message.pop("reasoning_content", None)
        if role == FUNCTION and not message["content"].strip():
            message["content"] = no_content
        return {**message, "role": _ROLES.get(role, role)}


def _call(call, form):
    """Convert a call to Hugging Face's form: `type`, `function`, and further entries of the record, such as `id`."""
    function = call.get("function") or {name: call[name] for name in ("name", "arguments") if name in call}
    given, parsed = function.get("arguments"), parse_arguments(function)
    if isinstance(given, str) and given.strip() and form != _OBJECT:
        arguments = _TextArguments(given)
    elif form == _TEXT:
        arguments = _TextArguments(json.dumps(parsed, ensure_ascii=False))
    else:
        arguments = _ObjectArguments(parsed)
    others = {name: value for name, value in call.items() if value is not None and name not in ("function", *function)}
    return {"type": "function", **others, "function": {**function, "arguments": arguments}}


class _OtherForm(TypeError):
    """Error: a template expects the arguments of calls in the other form."""


class _ObjectArguments(dict):
    """Arguments of a call as an object, for templates that write JSON; writing them as text raises _OtherForm."""

    def __str__(self):
        raise _OtherForm("the template writes the arguments of a call as text, but they are an object")


class _TextArguments(str):
    """Arguments of a call as JSON text, for templates that write it unchanged; others would quote it again."""


def _refuse_text_arguments(value):
    if isinstance(value, _TextArguments):
        raise _OtherForm("the template writes the arguments of a call as JSON, but they are text")
    if isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            _refuse_text_arguments(entry)
