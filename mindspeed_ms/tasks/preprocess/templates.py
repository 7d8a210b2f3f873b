"""Chat templates: render the messages of a conversation to ids and mark the positions that are learnt.

A template is an entry of `templates.json`: upstream's schema, so a user's own file works too (`--prompt-type-path`). Two
keys beyond it: `no_thought`, the text of an empty thought that is not learnt (default: both thought words), and
`enable_thinking`, the default of the caller's option.

Every string slot is encoded by itself (see slots.py). Everything an assistant or function turn consists of is learnt, its end
token included; all else is masked.
"""

import difflib
import json
import os
import re
from dataclasses import dataclass

from mindspeed_ms.core.datasets.tokenizer.chat_template import TemplateError
from mindspeed_ms.core.logging import logger
from mindspeed_ms.tasks.preprocess.messages import ASSISTANT, FUNCTION, calls_of, rounds, split_system, spoken
from mindspeed_ms.tasks.preprocess.slots import FunctionSlots, Slots, encode_slots, single_token, tool_format_of
from mindspeed_ms.tasks.preprocess.tool_formats import ToolFormat, describe_tools

DEFAULT_TEMPLATES = os.path.join(os.path.dirname(__file__), "templates.json")
FROM_TOKENIZER = "chat_template"
IGNORE_INDEX = -100
END_OF_TEXT = "<|endoftext|>"
_CLASSES = ("Template", "Llama2Template", "LFDefaultTemplate", "ReasoningTemplate")
BESIDE_CALLS = "texts of messages that also call tools were left out (the calls are kept)"
_FORMATS = ("user", "assistant", "system", "function", "observation", "tools", "separator", "prefix")
_KEYS = (
    *(f"format_{name}" for name in _FORMATS),
    "name",
    "default_system",
    "stop_words",
    "thought_words",
    "efficient_eos",
    "replace_eos",
    "force_system",
    "template_class",
    "no_thought",
    "enable_thinking",
)
_MARKER = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜<>]+｜>")


@dataclass(frozen=True)
class Template:
    """One chat template.

    Attributes:
        name (str): value of `--prompt-type`.
        user, assistant, system, function, observation, separator, prefix (Slots): the formats; `user` holds the header of
            the answer as well.
        tools (ToolFormat): the text that describes tools, behind the system message.
        default_system (str): for conversations without a system message.
        stop_words (tuple[str]): tokens that end an answer.
        thought_words (tuple[str, str]): opening and closing of a thought.
        no_thought (str): an empty thought that is part of the prompt.
        efficient_eos (bool): the end token is no part of an answer: the first token of the next question is labelled with
            it, and the sample ends with one.
        replace_eos (bool): the first stop word is the end token.
        template_class (str): Template, Llama2Template (the system message is inside the first question),
            LFDefaultTemplate (no separator) or ReasoningTemplate (answers have thoughts).
        enable_thinking (Optional[bool]): of a ReasoningTemplate. False: thoughts are removed, and an empty one ends the
            prompt. None: thoughts are kept, answers without one get an empty one in the prompt. True: answers without
            one begin with an empty one, which is learnt.
    """

    name: str
    user: Slots
    assistant: Slots
    system: Slots
    function: FunctionSlots
    observation: Slots
    tools: ToolFormat
    separator: Slots
    prefix: Slots
    default_system: str
    stop_words: tuple
    thought_words: tuple
    no_thought: str
    efficient_eos: bool
    replace_eos: bool
    template_class: str
    enable_thinking: bool | None

    @property
    def answers_end(self):
        """Whether a model trained with this template learns to stop; not with `empty`, which needs `--append-eod`."""
        return self.efficient_eos or self.assistant.ends_with_text

    def encode_multiturn(self, tokenizer, messages, system=None, tools=None):
        """Encode each question and its answer: list of (source ids, target ids), both list[int].

        Args:
            tokenizer (Tokenizer): after `fix_tokenizer`.
            messages (list[dict]): see messages.py: user or observations, then assistant or function, and so on. A system
                message may be first.
            system (Optional[str]): system message; default: the template's.
            tools (Optional[str or list]): json of the tools.

        Raises:
            TemplateError: roles that do not alternate, tools or calls that are no valid json, a token that is missing.
        """
        system, messages = split_system(messages, system)
        filled, answers = [], []
        for number, (questions, answer) in enumerate(rounds(messages)):
            content = "" if answer["role"] == FUNCTION else spoken(answer)
            if self._has_thoughts and self.enable_thinking is False:
                content = self._without_thought(content)
            answers.append(content)
            filled.append(self._question(number, questions, system, tools))
            filled.append(
                self.assistant.fill(content=content, idx=str(number))
                if answer["role"] == ASSISTANT
                else self.function.fill(calls_of(answer))
            )
        encoded = encode_slots(tokenizer, filled)
        pairs = list(zip(encoded[::2], encoded[1::2]))
        if self._has_thoughts:
            pairs = [self._with_thought(tokenizer, pair, content) for pair, content in zip(pairs, answers)]
        return pairs

    def left_out(self, messages):
        """Parts of these messages that the template does not write, as texts for the report (list[str])."""
        return [BESIDE_CALLS for message in messages if message.get("tool_calls") and spoken(message).strip()]

    def ids_and_labels(self, tokenizer, pairs):
        """Sample from (source ids, target ids) pairs: ids and labels (list[int] of equal length).

        A label is the id itself where it is learnt, else -100; the shift by one is the trainer's.
        """
        ids, labels = [], []
        for turn, (source, target) in enumerate(pairs):
            masked = [IGNORE_INDEX] * len(source)
            if self.efficient_eos and turn and masked:
                masked[0] = tokenizer.eos
            ids += [*source, *target]
            labels += [*masked, *target]
        if self.efficient_eos:
            ids.append(tokenizer.eos)
            labels.append(tokenizer.eos)
        return ids, labels

    @property
    def _has_thoughts(self):
        return self.template_class == "ReasoningTemplate"

    def _question(self, number, questions, system, tools):
        """Filled slots of the questions of a round."""
        slots, inside = [], ""
        if number == 0:
            slots += self.prefix.fill()
            text = (system or self.default_system) + (describe_tools(self.tools, tools) if tools else "")
            rendered = self.system.fill(content=text) if text else []
            if self.template_class == "Llama2Template":
                inside = "".join(slot for slot in rendered if isinstance(slot, str))
            else:
                slots += rendered
        elif self.template_class != "LFDefaultTemplate":
            slots += self.separator.fill()
        form = getattr(self, questions[0]["role"])
        return slots + form.fill(content=inside + form.join([message["content"] for message in questions]), idx=str(number))

    def _without_thought(self, content):
        begin, end = (re.escape(word.strip()) for word in self.thought_words)
        return re.sub(f"{begin}.*?{end}", "", content, flags=re.DOTALL).lstrip("\n")

    def _with_thought(self, tokenizer, pair, content):
        """Pair with an empty thought, if its answer has none."""
        if any(word.strip() in content for word in self.thought_words):
            return pair
        source, target = pair
        if self.enable_thinking:
            return source, tokenizer.tokenize("".join(self.thought_words), add_special_tokens=False) + target
        return source + tokenizer.tokenize(self.no_thought, add_special_tokens=False), target


def load_templates(path=None):
    """Load all templates of a file (default: the package's): dict[str, Template].

    Raises:
        TemplateError: the file is missing or damaged, an entry is wrong or its name is there twice.
    """
    path = path or DEFAULT_TEMPLATES
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
    except OSError as error:
        raise TemplateError(f"--prompt-type-path is {path}: {error.strerror}.") from error
    except ValueError as error:
        raise TemplateError(f"--prompt-type-path is {path}, which is no valid json: {error}.") from error
    if not isinstance(entries, list):
        raise TemplateError(f"{path} holds a {type(entries).__name__}: expected a json list of templates.")
    templates = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise TemplateError(f"{path}: entry {number + 1} is no object with a name.")
        if entry["name"] in templates:
            raise TemplateError(f"{path}: the template {entry['name']} is there twice.")
        templates[entry["name"]] = _template(entry, f"{path}: template {entry['name']}")
    return templates


def _template(entry, where):
    for key in entry:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            raise TemplateError(f"{where}: unknown key {key!r}" + (f", did you mean {near[0]}?" if near else "."))
    kind = entry.get("template_class", "Template")
    if kind not in _CLASSES:
        raise TemplateError(f"{where}: template_class is {kind!r}, expected one of {', '.join(_CLASSES)}.")
    efficient_eos, stop_words = bool(entry.get("efficient_eos")), tuple(entry.get("stop_words", ()))
    if entry.get("replace_eos") and not stop_words:
        raise TemplateError(f"{where}: replace_eos needs stop_words, the first of which becomes the end token.")
    end = [] if efficient_eos else [["eos_token"]]
    system = entry.get("default_system", "")
    thought_words = tuple(entry.get("thought_words", ("<think>\n", "\n</think>\n\n")))
    if len(thought_words) != 2:
        raise TemplateError(f"{where}: thought_words needs two texts, opening and closing, but has {len(thought_words)}.")

    def slots(name, default, *allowed):
        return Slots(entry.get(f"format_{name}", {}).get("slots", default), f"{where}: format_{name}", allowed)

    user = slots("user", ["{{content}}"], "content", "idx")
    function = entry.get("format_function", {})
    tool_format = entry.get("format_tools", {}).get("tool_format", "default")
    return Template(
        name=entry["name"],
        user=user,
        assistant=slots("assistant", ["{{content}}", *end], "content"),
        system=slots("system", ["{{content}}"], "content"),
        function=FunctionSlots(
            function.get("slots", ["Action: {{name}}\nAction Input: {{arguments}}", *end]),
            f"{where}: format_function",
            function.get("tool_format", "default"),
        ),
        observation=slots("observation", user.slots, "content", "idx"),
        tools=tool_format_of(tool_format, f"{where}: format_tools"),
        separator=slots("separator", []),
        prefix=slots("prefix", []),
        default_system=system if isinstance(system, str) else "".join(system),
        stop_words=stop_words,
        thought_words=thought_words,
        no_thought=entry.get("no_thought", "".join(thought_words)),
        efficient_eos=efficient_eos,
        replace_eos=bool(entry.get("replace_eos")),
        template_class=kind,
        enable_thinking=entry.get("enable_thinking"),
    )


def fix_tokenizer(tokenizer, template):
    """Set the end and padding tokens that a template needs in a tokenizer, as upstream does.

    With `replace_eos` the first stop word becomes the end token; without any end token `<|endoftext|>` does; without a padding
    token the end token pads; further stop words become special tokens. A ChatTemplate only gets the padding token.

    Returns:
        list[str]: tokens that were added behind the vocabulary; a model needs rows for them.

    Raises:
        TemplateError: the tokenizer lacks a token that the template names as one.
    """
    words, added = list(template.stop_words), []
    if template.replace_eos:
        added += tokenizer.add_special_tokens(words[:1])
        tokenizer.eos = tokenizer.token_to_id(words.pop(0))
    elif tokenizer.eos is None and isinstance(template, Template):
        added += tokenizer.add_special_tokens([END_OF_TEXT])
        tokenizer.eos = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.use_eos_as_pad()
    if words:
        added += tokenizer.add_special_tokens(words)
    if isinstance(template, Template):
        _check_tokens(tokenizer, template)
    if added:
        logger.warning(
            "the template %s adds %s behind the vocabulary of %s, which now has %d ids: the model needs as many "
            "rows of word embeddings",
            template.name,
            ", ".join(added),
            tokenizer.name,
            tokenizer.vocab_size,
        )
    return added


def _check_tokens(tokenizer, template):
    formats = (template.user, template.assistant, template.system, template.observation, template.prefix, template.separator)
    for token in (token for slots in formats for token in slots.tokens()):
        single_token(tokenizer, token)
    markers = {marker for slots in formats for slot in slots.slots if isinstance(slot, str) for marker in _MARKER.findall(slot)}
    unknown = sorted(marker for marker in markers if tokenizer.token_to_id(marker) is None)
    if unknown:
        logger.warning(
            "the template %s has %s, which %s does not know as single tokens: they are encoded letter by letter. Is "
            "it the template of this model?",
            template.name,
            ", ".join(unknown),
            tokenizer.name,
        )
