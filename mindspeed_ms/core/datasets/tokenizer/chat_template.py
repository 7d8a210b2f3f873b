"""JinjaTemplate: the chat template in a tokenizer's folder (`tokenizer_config.json` or `chat_template.jinja`), in a sandbox."""

import json
from datetime import datetime

from jinja2 import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateError(ValueError):
    """Error: a template cannot be used, or a conversation does not fit it; the message says why."""


class JinjaTemplate:
    """Chat template of a tokenizer, which renders conversations to text.

    Args:
        tokenizer (Tokenizer): with a chat_template.
        enable_thinking (Optional[bool]): handed to the template, which may heed it.
        missing (str): message if there is none; `{place}` is where it was looked for.

    Raises:
        TemplateError: there is no template, or jinja cannot read it.
    """

    def __init__(self, tokenizer, enable_thinking=None, missing="a conversation needs a chat template, but {place}."):
        if tokenizer is None or not tokenizer.chat_template:
            raise TemplateError(
                missing.format(place="there is no tokenizer" if tokenizer is None else f"{tokenizer.name} has none")
            )
        self.enable_thinking = enable_thinking
        inverse = tokenizer.inv_vocab
        self._tokens = {f"{role}_token": inverse.get(getattr(tokenizer, role), "") for role in ("bos", "eos", "pad")}
        sources = [tokenizer.chat_template, tokenizer.tool_chat_template or tokenizer.chat_template]
        try:
            self._templates = [_environment(self.to_json).from_string(source) for source in sources]
        except JinjaError as error:
            raise TemplateError(f"the chat template of {tokenizer.name} is no valid jinja: {error}.") from error

    def render(self, messages, tools=None, add_generation_prompt=False, **options):
        """Render messages (list[dict] in the roles of Hugging Face) to text. `options` win over `enable_thinking`.

        Raises:
            TemplateError: the template refuses them.
        """
        variables = dict(
            self._tokens, messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt
        )
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        try:
            return self._templates[bool(tools)].render(variables | options)
        except Exception as error:  # a template calls methods of any value
            raise TemplateError(f"the tokenizer's chat template refuses the conversation: {error}.") from error

    @staticmethod
    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        """The filter `tojson` of transformers: no html escapes."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """Jinja extension for `{% generation %}`, which marks answers; it renders its content."""

    tags = frozenset(["generation"])

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _environment(to_json):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
    return environment


def _raise(message):
    raise JinjaError(message)
