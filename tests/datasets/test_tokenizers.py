"""Ids of the recordings, the rules of Hugging Face folders, and messages about files that cannot be used."""

import json
import os
import pickle
import shutil

import numpy as np
import pytest

from mindspeed_ms.core.datasets.tokenizer import TokenizerError, TokenizerSettings, build_tokenizer, model_vocab_size
from tests.datasets.llama_folder import write_llama
from tests.preprocess.toy_tokenizer import toy_tokenizer, write_tokenizer

GOLDEN = os.path.join(os.environ.get("MINDSPEED_MS_GOLDEN", ""), "data")
needs_golden = pytest.mark.skipif(not os.path.isdir(GOLDEN), reason="needs the recordings in MINDSPEED_MS_GOLDEN")
GPT2 = {"vocab_file": f"{GOLDEN}/gpt2bpe/vocab.json", "merge_file": f"{GOLDEN}/gpt2bpe/merges.txt"}
SP = f"{GOLDEN}/sp.model"


@needs_golden
@pytest.mark.parametrize(
    "settings, name, corpus",
    [
        (TokenizerSettings("GPT2BPETokenizer", **GPT2), "a_gpt2bpe", "corpus_a"),
        (TokenizerSettings("GPT2BPETokenizer", **GPT2), "b_gpt2bpe", "corpus_b"),
        (TokenizerSettings("SentencePieceTokenizer", tokenizer_model=SP), "a_sp", "corpus_a"),
    ],
)
def test_ids_of_the_recordings(settings, name, corpus):
    tokenizer = pickle.loads(pickle.dumps(build_tokenizer(pickle.loads(pickle.dumps(settings)))))
    with open(f"{GOLDEN}/{corpus}.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    encoded = tokenizer.encode_batch(texts)
    assert encoded[3] == tokenizer.tokenize(texts[3])
    assert tokenizer.detokenize(encoded[3]) == texts[3]
    recorded = np.fromfile(f"{GOLDEN}/{name}_text_document.bin", np.uint16)
    np.testing.assert_array_equal(np.concatenate([[*ids, tokenizer.eod] for ids in encoded]), recorded)


@needs_golden
def test_types_on_one_sentencepiece_model():
    plain, llama, megatron = (
        build_tokenizer(TokenizerSettings(kind, tokenizer_model=SP, vocab_extra_ids=2))
        for kind in ("GPTSentencePieceTokenizer", "Llama2Tokenizer", "SentencePieceTokenizer")
    )
    text = "mi 你"
    ids = plain.tokenize(text)
    assert "▁" in plain.inv_vocab[ids[0]] and plain.inv_vocab[ids[-1]] == "<0xA0>"  # space in front, byte fallback
    assert llama.tokenize(text) == [1, *ids] and llama.tokenize(text, add_special_tokens=False) == ids
    assert (llama.adds_bos, plain.adds_bos, plain.eod, plain.pad, plain.vocab_size) == (True, False, 2, None, 600)
    assert megatron.eod == megatron.vocab["<EOD>"] == 602 and megatron.vocab_size == 607
    assert megatron.tokenize(f"{text}<extra_id_1>{text}") == [*ids, 606, *ids]
    assert megatron.detokenize([*ids, 606, *ids]) == f"{text}<extra_id_1>{text}"


@needs_golden
def test_folder_with_a_sentencepiece_model(tmp_path):
    shutil.copy(SP, tmp_path / "tokenizer.model")

    def built(**config):
        added = {
            "1": {"content": "<s>", "special": True},
            "2": {"content": "</s>", "special": True},
            "600": {"content": "<|end|>", "special": True, "rstrip": True},
        }
        config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "added_tokens_decoder": added, **config}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return build_tokenizer(TokenizerSettings("PretrainedFromHF", str(tmp_path)))

    legacy, plain = built(), built(legacy=False, add_bos_token=False, add_eos_token=True, pad_token="</s>")
    mi, without_space = legacy.tokenize("mi", False), plain.tokenize("</s>mi", False)[1:]
    assert legacy.tokenize("mi</s>mi<|end|> mi") == [1, *mi, 2, *mi, 600, *mi]
    assert plain.tokenize("mi</s>mi") == [*mi, 2, *without_space, 2] and without_space != mi
    assert plain.detokenize(plain.tokenize("mi</s>mi", False)) == "mi</s>mi"
    assert plain.detokenize([2, *mi]) == "</s> mi" and legacy.detokenize([2, *mi]) == "</s>mi"
    assert (plain.pad, legacy.pad, legacy.vocab_size, legacy.eod) == (2, None, 601, 2)


# by the slow LlamaTokenizer of transformers 4.57.1: legacy, not legacy; then for a model that keeps blanks, as Llama's
LLAMA = {
    "": ("", "", "", ""),
    " mi": ("▁mi", "▁mi", "▁ ▁mi", "▁ ▁mi"),
    "  mi  mi": ("▁mi ▁mi", "▁mi ▁mi", "▁ ▁ ▁mi ▁ ▁mi", "▁ ▁ ▁mi ▁ ▁mi"),
    "mi</s>mi": ("▁mi </s> ▁mi", "▁mi </s> mi", "▁mi </s> ▁mi", "▁mi </s> mi"),
    "mi </s> mi": ("▁mi </s> ▁mi", "▁mi </s> ▁mi", "▁mi ▁ </s> ▁ ▁mi", "▁mi ▁ </s> ▁mi"),
    "</s>  mi": ("</s> ▁mi", "</s> ▁mi", "</s> ▁ ▁ ▁mi", "</s> ▁ ▁mi"),
    "<|end|>mi": ("<|end|> ▁mi", "<|end|> mi", "<|end|> ▁mi", "▁ <|end|> mi"),
    "<s><|end|>\nmi": ("<s> <|end|> ▁mi", "<s> <|end|> mi", "<s> <|end|> ▁ <0x0A> mi", "<s> <|end|> <0x0A> mi"),
    "mi <|end|> mi": ("▁mi <|end|> ▁mi", "▁mi <|end|> ▁mi", "▁mi ▁ <|end|> ▁ ▁mi", "▁mi ▁ <|end|> ▁mi"),
    "🙂▁mi": ("▁ <0xF0> <0x9F> <0x99> <0x82> ▁mi",) * 4,
}


@needs_golden
@pytest.mark.parametrize("column", range(4))
def test_blanks_and_special_tokens_of_a_llama_model(tmp_path, column):
    write_llama(tmp_path, legacy=column % 2 == 0, drops_blanks=column < 2)
    tokenizer = build_tokenizer(TokenizerSettings("PretrainedFromHF", str(tmp_path)))
    for text, wanted in LLAMA.items():
        ids = tokenizer.tokenize(text, add_special_tokens=False)
        assert " ".join(tokenizer.inv_vocab[number] for number in ids) == wanted[column]
    tokenizer.named.add("<|end|>")  # as additional_special_tokens does
    assert tokenizer.inv_vocab[tokenizer.tokenize("<|end|>mi", add_special_tokens=False)[0]] == "<|end|>"


def test_settings_of_a_hugging_face_folder(tmp_path):
    bare = toy_tokenizer(tmp_path)
    ids = bare.tokenize("fine")
    assert not bare.adds_bos and bare.eod == bare.vocab["</s>"] and bare.pad is None
    asked = toy_tokenizer(tmp_path, add_bos_token=True, add_eos_token=True, pad_token="<|endoftext|>")
    assert asked.tokenize("fine") == [asked.bos, *ids, asked.eos] and asked.tokenize("fine", False) == ids
    assert asked.inv_vocab[asked.pad] == "<|endoftext|>"
    size = bare.vocab_size
    added = toy_tokenizer(tmp_path, added_tokens_decoder={str(size): {"content": "<|mine|>", "special": True}})
    assert added.tokenize("fine<|mine|>") == [*ids, size] and added.vocab_size == size + 1
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": {"content": "<|end|>"}}')
    assert toy_tokenizer(tmp_path).pad == bare.vocab["<|end|>"]


def test_post_processor_of_tokenizer_json(tmp_path):
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    }
    content["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    }
    path.write_text(json.dumps(content))
    tokenizer = build_tokenizer(TokenizerSettings(tokenizer_model=str(path)))
    assert tokenizer.adds_bos and tokenizer.tokenize("fine") == [0, *tokenizer.tokenize("fine", False)]
    assert len(tokenizer.tokenize("fine")) < 10


def test_null_tokenizer_and_padded_vocabulary(caplog):
    tokenizer = build_tokenizer(TokenizerSettings("NullTokenizer", vocab_size=128))
    assert tokenizer.tokenize("3 1 127") == [3, 1, 127] and tokenizer.detokenize([3, 1]) == "3 1"
    assert (tokenizer.eod, tokenizer.vocab_size) == (128, 129)
    with caplog.at_level("INFO"):
        assert model_vocab_size(tokenizer, 64, 2) == 256
    assert "129 ids, padded to 256 (127 unused" in caplog.text
    for text, words in (("3 x", "reads numbers"), ("129", "id 129 is outside")):
        with pytest.raises(TokenizerError, match=words):
            tokenizer.tokenize(text)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({}, "no tokenizer is named"),
        ({"tokenizer_type": "Bert"}, "tokenizer_type .* is 'Bert': expected one of"),
        ({"tokenizer_type": "PretrainedFromHF"}, "needs --tokenizer-name-or-path"),
        ({"tokenizer_type": "Llama2Tokenizer"}, "needs --tokenizer-model"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "FOLDER/vocab.json"}, "vocab.json: there is no such file"),
        ({"tokenizer_type": "NullTokenizer"}, "needs --vocab-size"),
        ({"tokenizer_name_or_path": "FOLDER/nowhere"}, "no such folder or file .*nothing is downloaded"),
        ({"tokenizer_name_or_path": "FOLDER"}, "no tokenizer.json, no tokenizer.model .*Found there: "),
        ({"tokenizer_name_or_path": "FOLDER/text.json"}, "is no tokenizer.json, or damaged"),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "FOLDER/text.json"}, "is no sentencepiece model"),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "FOLDER/empty.model"}, "is empty"),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "FOLDER"}, "that is a folder"),
        ({"vocab_file": "FOLDER/text.json", "merge_file": "FOLDER/text.json"}, "are no GPT2 vocabulary and merges"),
    ],
)
def test_what_cannot_be_built(settings, words, tmp_path):
    (tmp_path / "text.json").write_text("Once upon a time")
    (tmp_path / "empty.model").write_bytes(b"")
    settings = {
        name: value.replace("FOLDER", str(tmp_path)) if isinstance(value, str) else value for name, value in settings.items()
    }
    with pytest.raises(TokenizerError, match=words):
        build_tokenizer(TokenizerSettings(**settings))


def test_settings_that_disagree_with_the_vocabulary(tmp_path):
    for config, words in (
        ({"eos_token": "<|none|>"}, "eos_token is '<|none|>', which is not in the vocabulary"),
        ({"bos_token": None, "add_bos_token": True}, "there is no bos_token"),
        ({"added_tokens_decoder": {"5000": {"content": "<|far|>"}}}, "should have id 5000"),
        ({"eos_token": ["</s>", "<|end|>"]}, "tokenizer_config.json: eos_token is ['</s>', '<|end|>'], expected one token"),
        ({"bos_token": {"id": 0}}, "bos_token is {'id': 0}, expected one token"),
        ({"pad_token": 3}, "pad_token is 3, expected one token"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder is {'x': {'content': 'a'}}, expected an id"),
        ({"added_tokens_decoder": {"5": {"content": None}}}, "added_tokens_decoder is {'content': None}, expected one token"),
        ({"added_tokens_decoder": ["a"]}, "added_tokens_decoder is ['a'], expected an object"),
        ({"chat_template": 3}, "chat_template is 3, expected a template"),
        ({"chat_template": [{"name": "default"}]}, "expected an object of a name and a template"),
    ):
        with pytest.raises(TokenizerError) as caught:
            toy_tokenizer(tmp_path, **config)
        assert words in str(caught.value)
    for name, content, words in (
        (
            "special_tokens_map.json",
            {"pad_token": ["</s>"]},
            "special_tokens_map.json: pad_token is ['</s>'], expected one token",
        ),
        ("added_tokens.json", {"<|a|>": "900"}, "added_tokens.json: <|a|> is '900', expected an id"),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        with pytest.raises(TokenizerError) as caught:
            toy_tokenizer(tmp_path)
        assert words in str(caught.value)
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is no json file"):
        build_tokenizer(TokenizerSettings(tokenizer_name_or_path=str(tmp_path)))
    nameless = toy_tokenizer(tmp_path, eos_token=None)
    assert nameless.eos == nameless.vocab["<|endoftext|>"]
    with pytest.raises(TokenizerError, match="outside the vocabulary"):
        nameless.detokenize([5000])
