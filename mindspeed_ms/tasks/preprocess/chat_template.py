"""ChatTemplate: a tokenizer's jinja template (`tokenizer_config.json` or `chat_template.jinja`), rendered in a sandbox."""

import json
from datetime import datetime

from jinja2 import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mindspeed_ms.tasks.preprocess.templates import FROM_TOKENIZER, Template, check_roles
from mindspeed_ms.tasks.preprocess.tool_formats import TemplateError, parse_calls, parse_tools

_ROLES = {"observation": "tool", "function": "assistant"}


class ChatTemplate:
    """A tokenizer's own template, with the methods of Template.

    The conversation is rendered again for each answer, up to the header of the answer and up to its end. What the answer
    adds is learnt.

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
        if tokenizer is None or not tokenizer.chat_template:
            place = "there is no tokenizer" if tokenizer is None else f"{tokenizer.name} has none"
            raise TemplateError(
                f"--prompt-type {FROM_TOKENIZER} needs a chat template in the tokenizer's folder, but {place}: "
                "name a template of templates.json instead."
            )
        self.enable_thinking = enable_thinking
        inverse = tokenizer.inv_vocab
        self._tokens = {f"{role}_token": inverse.get(getattr(tokenizer, role), "") for role in ("bos", "eos", "pad")}
        try:
            self._template = _environment().from_string(tokenizer.chat_template)
        except JinjaError as error:
            raise TemplateError(f"the chat template of {tokenizer.name} is no valid jinja: {error}.") from error

    def render(self, messages, tools=None, add_generation_prompt=False):
        """Text of messages (list[dict] in the roles of Hugging Face).

        Raises:
            TemplateError: the template refuses them.
        """
        variables = dict(
            self._tokens, messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt
        )
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        try:
            return self._template.render(**variables)
        except (JinjaError, TypeError) as error:
            raise TemplateError(f"the tokenizer's chat template refuses the conversation: {error}.") from error

    def encode_multiturn(self, tokenizer, messages, system=None, tools=None):
        """See Template.

        Raises:
            TemplateError: also if the template writes earlier turns differently once later ones follow.
        """
        if messages and messages[0]["role"] == "system":
            system, messages = system or messages[0]["content"], messages[1:]
        check_roles(messages)
        spoken = [{"role": "system", "content": system}] if system else []
        tools = [{"type": "function", "function": tool} for tool in parse_tools(tools)] if tools else None
        pairs, done = [], ""
        for number, message in enumerate(messages):
            if number % 2:
                prompt = self.render(spoken, tools, add_generation_prompt=True)
            spoken.append(_message(message))
            if number % 2 == 0:
                continue
            whole = self.render(spoken, tools)
            if not (prompt.startswith(done) and whole.startswith(prompt)):
                raise TemplateError(
                    f"the tokenizer's chat template changes what stands before message {number + 1} once it is "
                    "there, so no part can be learnt by itself: use single-turn data, or a template of "
                    "templates.json."
                )
            pairs.append(
                tuple(
                    tokenizer.tokenize(text, add_special_tokens=False) for text in (prompt[len(done) :], whole[len(prompt) :])
                )
            )
            done = whole
        return pairs

    ids_and_labels = Template.ids_and_labels


def _message(message):
    role = message["role"]
    if role == "function":
        calls = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in parse_calls(message["content"])
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    return {**message, "role": _ROLES.get(role, role)}


class _Generation(Extension):
    """`{% generation %}` marks answers; it renders what is inside."""

    tags = frozenset(["generation"])

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _environment():
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
    return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message):
    raise JinjaError(message)
