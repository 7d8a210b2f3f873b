"""Hugging Face folders and their chat templates, against transformers itself (needs the `[peer]` extra)."""

import importlib.metadata
import importlib.util
import json
import random
import subprocess
import sys

import pytest

from mindspeed_ms.core.datasets.tokenizer import TokenizerSettings, build_tokenizer
from mindspeed_ms.tasks.preprocess.chat_template import get_template
from tests.datasets.llama_folder import write_llama
from tests.preprocess.toy_tokenizer import toy_tokenizer, write_tokenizer

pytestmark = pytest.mark.peer
TEXTS = ["how are <|mine|> you?", "\n\nfine </s> <|im_end|>a", "你好 <think>", "", "   blanks  "]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells é.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "how?\n"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "上海"}}}],
    },
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": " fine "},
    {"role": "user", "content": "<b>"},
]
JINJA = """{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\n' + messages[0].content + '\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' ~ call.function | tojson(indent=2) ~ '</tool_call>' }}
    {%- endfor %}
    {% if message.role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}
    {% endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
BOS_IN_FRONT = {
    "type": "TemplateProcessing",
    "pair": [],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
}


def by_transformers(folder, question):
    """Its answers about the tokenizer in a folder."""
    paths = folder / "question.json", folder / "answer.json"
    paths[0].write_text(json.dumps(question))
    subprocess.run([sys.executable, "-m", "tests.peer.transformers_reference", folder, *paths], check=True)
    return json.loads(paths[1].read_text())


@pytest.mark.parametrize("post_processor", [None, BOS_IN_FRONT])
def test_ids_and_conversations(post_processor, tmp_path):
    size = toy_tokenizer(tmp_path).vocab_size
    added = {
        str(size): {
            "content": "<|mine|>",
            "special": True,
            "lstrip": True,
            "rstrip": False,
            "single_word": False,
            "normalized": False,
        }
    }
    write_tokenizer(
        tmp_path,
        tokenizer_class="PreTrainedTokenizerFast",
        chat_template=JINJA,
        added_tokens_decoder=added,
        pad_token="<|endoftext|>",
        add_bos_token=True,
    )
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": post_processor}))
    wanted = by_transformers(tmp_path, {"texts": TEXTS, "messages": MESSAGES, "tools": TOOLS})
    tokenizer = build_tokenizer(TokenizerSettings("PretrainedFromHF", str(tmp_path)))
    template = get_template("chat_template", tokenizer=tokenizer, enable_thinking=False)
    assert wanted == {
        "ids": tokenizer.encode_batch(TEXTS),
        "plain": tokenizer.encode_batch(TEXTS, add_special_tokens=False),
        "size": tokenizer.vocab_size,
        "roles": [tokenizer.bos, tokenizer.eos, tokenizer.pad],
        "chat": template.render(MESSAGES, TOOLS, add_generation_prompt=True),
    }


def has_slow_tokenizers():
    """Whether transformers still has the tokenizers that run sentencepiece itself (up to version 4)."""
    return importlib.metadata.version("transformers").startswith("4.")


LEGACY = [True, False] if importlib.util.find_spec("transformers") and has_slow_tokenizers() else [False]


@pytest.mark.parametrize("legacy", LEGACY)
def test_sentencepiece_models(legacy, tmp_path):
    """Blanks and special tokens of a Llama model. transformers 5 rebuilds the model with `tokenizers`, without the old rules:
    only `legacy` false is compared with it, where both agree on purpose: texts that begin with no blank or added token."""
    is_slow = has_slow_tokenizers()
    write_llama(tmp_path, legacy, drops_blanks=False)
    texts = [text for text in sentencepiece_texts() if is_slow or not text.startswith((" ", "▁", "<|end|>"))]
    tokenizer = build_tokenizer(TokenizerSettings("PretrainedFromHF", str(tmp_path)))
    wanted = by_transformers(tmp_path, {"texts": texts, "use_fast": not is_slow})
    assert len(texts) > 100 and wanted["ids"] == tokenizer.encode_batch(texts)
    assert wanted["plain"] == tokenizer.encode_batch(texts, add_special_tokens=False)


def sentencepiece_texts():
    draw = random.Random(5)
    pieces = [" ", "  ", "mi", "</s>", "<|end|>", "\n", "你", "▁", "<s>", "a", "\t", ". "]
    return ["".join(draw.choices(pieces, k=draw.randint(1, 7))) for _ in range(300)]
