"""Each template gives the ids and labels of its published form, every piece encoded by itself."""

import json
import re
from pathlib import Path

import pytest

from mindspeed_ms.tasks.preprocess.chat_template import get_template
from mindspeed_ms.tasks.preprocess.templates import TemplateError, fix_tokenizer, load_templates
from tests.preprocess.chats import DEFAULT_SYSTEMS, PLAIN, THINKING
from tests.preprocess.toy_tokenizer import toy_tokenizer

# begin and end with what would merge over a border
TEXTS = {"S": "the end.\n", "U1": "how are you?\n", "A1": "\nfine, and you?", "U2": "\nwell then: ", "A2": "the end.\n"}
MESSAGES = [
    {"role": role, "content": TEXTS[name]}
    for role, name in (("user", "U1"), ("assistant", "A1"), ("user", "U2"), ("assistant", "A2"))
]
MARKS = re.compile("(⟦|⟧|¦|†|<BOS>|<EOS>)")


def expected(tokenizer, chat, texts=TEXTS):
    ids, labels, learnt, end_next = [], [], False, False
    for piece in MARKS.split(chat):
        if piece in "⟦⟧":
            learnt = piece == "⟦" if piece else learnt
            continue
        if piece == "†":
            end_next = True
        if piece in ("¦", "†"):
            continue
        # the names of the texts stand alone: no letter or digit beside them
        text = re.sub(r"(?<![A-Za-z])(S|U1|U2|A1|A2)(?![a-zA-Z0-9])", lambda match: texts[match[1]], piece)
        new = {"<BOS>": [tokenizer.bos], "<EOS>": [tokenizer.eos]}.get(piece) or tokenizer.tokenize(text, False)
        marks = list(new) if learnt else [-100] * len(new)
        if end_next:
            marks[0], end_next = tokenizer.eos, False
        ids += new
        labels += marks
    return ids, labels


@pytest.fixture
def tokenizer(tmp_path):
    return toy_tokenizer(tmp_path)


def rendered(template, tokenizer, messages=MESSAGES, system=TEXTS["S"], tools=None):
    fix_tokenizer(tokenizer, template)
    return template.ids_and_labels(tokenizer, template.encode_multiturn(tokenizer, messages, system, tools))


def test_every_template_is_listed_here_and_on_its_page():
    names = set(load_templates())
    assert names == set(PLAIN)
    page = Path(__file__).parents[2] / "docs" / "tokenizers-and-templates.md"
    rows = re.findall(r"^\| (`[^|]*`) \|", page.read_text(encoding="utf-8").partition("## Chat templates")[2], re.MULTILINE)
    assert names <= {name for row in rows for name in re.findall("`([^`]+)`", row)}


def test_example_of_the_page(tmp_path, tokenizer):
    page = (Path(__file__).parents[2] / "docs" / "tokenizers-and-templates.md").read_text(encoding="utf-8")
    path = tmp_path / "templates.json"
    path.write_text(re.search("```json\n(.*?)```", page, re.DOTALL)[1], encoding="utf-8")
    found = rendered(get_template("mine", str(path)), tokenizer, MESSAGES[:2], None)
    assert found == expected(tokenizer, "<BOS><|user|>U1<|assistant|>⟦A1<EOS>⟧")
    assert tokenizer.eos == tokenizer.token_to_id("<|end|>")


@pytest.mark.parametrize("name", PLAIN)
def test_ids_and_labels(name, tokenizer):
    template = get_template(name)
    found = rendered(template, tokenizer)
    assert found == expected(tokenizer, PLAIN[name])
    assert sum(label != -100 for label in found[1]) > 0


@pytest.mark.parametrize("name", THINKING)
def test_an_empty_thought_that_is_learnt(name, tokenizer):
    assert rendered(get_template(name, enable_thinking=True), tokenizer) == expected(tokenizer, THINKING[name])


def test_thoughts_are_kept_or_removed(tokenizer):
    thought = "<think>\nhow?\n</think>\n\n"
    messages = [MESSAGES[0], {"role": "assistant", "content": thought + "fine"}]
    for enable, answer in ((None, f"⟦{thought}fine"), (True, f"⟦{thought}fine"), (False, "¦<think>\n\n</think>\n\n⟦fine")):
        chat = f"<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n⟧"
        found = rendered(get_template("qwen3", enable_thinking=enable), tokenizer, messages, None)
        assert found == expected(tokenizer, chat)


@pytest.mark.parametrize("name", DEFAULT_SYSTEMS)
def test_default_system(name, tokenizer):
    texts = TEXTS | {"S": DEFAULT_SYSTEMS[name]}
    assert rendered(get_template(name), tokenizer, system=None) == expected(tokenizer, PLAIN[name], texts)


def test_no_system_no_turn_for_it(tokenizer):
    found = rendered(get_template("chatml"), tokenizer, system=None)
    assert found == expected(tokenizer, PLAIN["chatml"].partition("¦")[2])


TOOLS = json.dumps(
    [
        {
            "name": "weather",
            "description": "Tells it.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "where", "enum": ["上海", "Rome"]}},
                "required": ["city"],
            },
        }
    ],
    ensure_ascii=False,
)
CALL = {"role": "function", "content": '{"name": "weather", "arguments": {"city": "上海"}}'}
TOOL_MESSAGES = [MESSAGES[0], CALL, {"role": "observation", "content": "rain"}, {"role": "assistant", "content": "fine"}]


def test_tools_of_qwen(tokenizer):
    system = (
        "S\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
        "function signatures within <tools></tools> XML tags:\n<tools>\n"
        + json.dumps({"type": "function", "function": json.loads(TOOLS)[0]}, ensure_ascii=False)
        + "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call>"
    )
    chat = (
        f"<|im_start|>system\n{system}<|im_end|>\n¦<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n⟦<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "上海"}}\n</tool_call><|im_end|>\n⟧<|im_start|>user\n<tool_response>\n'
        "rain\n</tool_response><|im_end|>\n<|im_start|>assistant\n⟦fine<|im_end|>\n⟧"
    )
    assert rendered(get_template("qwen_lf"), tokenizer, TOOL_MESSAGES, tools=TOOLS) == expected(tokenizer, chat)


def test_tools_in_the_default_format(tokenizer):
    system = (
        TEXTS["S"] + "You have access to the following tools:\n> Tool Name: weather\nTool Description: Tells it.\nTool Args:\n"
        "  - city (string, required): where, should be one of [上海, Rome]\n\nUse the following format if using a tool:\n"
        "```\nAction: tool name (one of [weather]).\nAction Input: the input to the tool, in a JSON format representing "
        'the kwargs (e.g. ```{"input": "hello world", "num_beams": 5}```).\n```\n'
    )
    call = 'Action: weather\nAction Input: {"city": "上海"}'
    chat = f"<BOS>{system}\n\n¦User: U1\n\nAssistant:⟦{call}<EOS>⟧User: rain\n\nAssistant:⟦fine<EOS>⟧"
    assert rendered(get_template("deepseek2"), tokenizer, TOOL_MESSAGES, tools=TOOLS) == expected(tokenizer, chat)


@pytest.mark.parametrize(
    "name, call",
    [
        ("glm4", 'weather\n{"city": "上海"}'),
        ("glm4_moe", "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>上海</arg_value>\n</tool_call>"),
        ("bailing_mini", '<tool_call>\n{"name": "weather", "arguments": {"city": "上海"}}\n</tool_call><|role_end|>'),
    ],
)
def test_calls_in_other_formats(name, call, tokenizer):
    template = get_template(name)
    fix_tokenizer(tokenizer, template)
    source, target = template.encode_multiturn(tokenizer, TOOL_MESSAGES, tools=TOOLS)[0]
    assert tokenizer.detokenize(target) == call
    assert "weather" in tokenizer.detokenize(source) and "上海" in tokenizer.detokenize(source)


def test_observations(tokenizer):
    for name, chat in {
        "qwen": "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n",
        "llama3": "<|start_header_id|>tool<|end_header_id|>\n\nrain<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "glm4": "<|observation|>\nrain<|assistant|>",
        "gemma": "<start_of_turn>tool\nrain<end_of_turn>\n<start_of_turn>model\n",
    }.items():
        template = get_template(name)
        fix_tokenizer(tokenizer, template)
        source, _ = template.encode_multiturn(tokenizer, TOOL_MESSAGES)[1]
        wanted = tokenizer.tokenize(chat, False)
        assert source[-len(wanted) :] == wanted


@pytest.mark.parametrize(
    "messages, words",
    [
        ([], "0 messages"),
        (MESSAGES[:3], "3 messages"),
        (MESSAGES[:1] * 2, "message 2 has the role 'user', expected assistant or function"),
        ([MESSAGES[0], {"role": "function", "content": "weather"}], "function turn must be json"),
    ],
)
def test_conversations_that_do_not_fit(messages, words, tokenizer):
    with pytest.raises(TemplateError, match=words):
        rendered(get_template("qwen3"), tokenizer, messages)


def test_tools_that_are_no_json(tokenizer):
    with pytest.raises(TemplateError, match="tools are no valid json"):
        rendered(get_template("qwen3"), tokenizer, tools="[{")
    with pytest.raises(TemplateError, match="has no format for tools"):
        rendered(get_template("deepseek4"), tokenizer, tools=TOOLS)


def test_names_and_files(tmp_path, tokenizer):
    with pytest.raises(TemplateError, match="did you mean qwen3"):
        get_template("qwen_3")
    path = tmp_path / "templates.json"
    with pytest.raises(TemplateError, match=r"templates\.json: No such file"):
        get_template("qwen", str(path))
    for content, words in (
        ("[", "no valid json"),
        ('{"name": "a"}', "expected a json list"),
        ('[{"name": "a"}, {"name": "a"}]', "a is there twice"),
        ('[{"name": "a", "stopwords": []}]', "did you mean stop_words"),
        ('[{"name": "a", "replace_eos": true}]', "replace_eos needs stop_words"),
        ('[{"name": "a", "format_user": {"slots": ["hi"]}}]', "format_user: no slot has {{content}}"),
        ('[{"name": "a", "format_user": {"slots": ["{{name}}"]}}]', "nothing is put in for {{name}}"),
        ('[{"name": "a", "format_prefix": {"slots": [["bos"]]}}]', "format_prefix: slot"),
        ('[{"name": "a", "template_class": "Mine"}]', "template_class is 'Mine'"),
    ):
        path.write_text(content)
        with pytest.raises(TemplateError, match=re.escape(words)):
            get_template("a", str(path))
    path.write_text('[{"name": "mine", "format_user": {"slots": ["Q: {{content}} A: "]}}]')
    found = rendered(get_template("mine", str(path)), tokenizer, MESSAGES[:2], None)
    assert found == expected(tokenizer, "Q: U1 A: ⟦A1<EOS>⟧")


def test_tokenizer_gets_what_the_template_needs(tmp_path, caplog):
    tokenizer = toy_tokenizer(tmp_path)
    size = tokenizer.vocab_size
    assert fix_tokenizer(tokenizer, get_template("chatml")) == []
    assert tokenizer.eos == tokenizer.pad == tokenizer.token_to_id("<|im_end|>")
    path = tmp_path / "templates.json"
    path.write_text('[{"name": "mine", "stop_words": ["<|stop|>", "<|halt|>"], "replace_eos": true}]')
    assert fix_tokenizer(tokenizer, get_template("mine", str(path))) == ["<|stop|>", "<|halt|>"]
    assert (tokenizer.eos, tokenizer.vocab_size) == (size, size + 2)
    assert tokenizer.tokenize("fine<|halt|>")[-1] == size + 1
    path.write_text('[{"name": "mine", "format_prefix": {"slots": [{"token": "[X]"}]}}]')
    with pytest.raises(TemplateError, match=r"needs the token '\[X\]'"):
        fix_tokenizer(tokenizer, get_template("mine", str(path)))


def test_only_empty_templates_do_not_end_answers():
    assert {name for name, template in load_templates().items() if not template.answers_end} == {"empty", "trl", "hunyuan"}


JINJA = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% else %}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_the_tokenizers_own_template(tmp_path):
    tokenizer = toy_tokenizer(tmp_path, chat_template=JINJA)
    template = get_template("chat_template", tokenizer=tokenizer)
    chat = (
        "<s><|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n⟦A1</s>⟧"
        "\n<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n⟦A2</s>⟧"
    )
    assert rendered(template, tokenizer) == expected(tokenizer, chat)


@pytest.mark.parametrize(
    "jinja, words",
    [
        (None, "needs a chat template"),
        ("{% for", "no valid jinja"),
        ("{{ raise_exception('only three roles') }}", "only three roles"),
        ("{{ messages.append(1) }}", "refuses the conversation"),
        ("{{ messages | length }}", "changes what stands before message 2"),
    ],
)
def test_chat_templates_that_cannot_be_used(jinja, words, tmp_path):
    tokenizer = toy_tokenizer(tmp_path, chat_template=jinja)
    with pytest.raises(TemplateError, match=words):
        rendered(get_template("chat_template", tokenizer=tokenizer), tokenizer)
