"""Tokenizers and runners of tests: a vocabulary that cuts characters, models that say a given text."""

import json

import numpy as np

from mindspeed_ms.core.datasets.tokenizer import TokenizerSettings, build_tokenizer
from mindspeed_ms.testing.inference import TableRunner

BYTE = 4
"""Id of byte 0 in `byte_fallback_tokenizer`."""


def from_json(folder, backend, **config):
    """The tokenizer of a Hugging Face folder with this `tokenizers.Tokenizer`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return build_tokenizer(TokenizerSettings("PretrainedFromHF", tokenizer_name_or_path=str(folder)))


def byte_level_tokenizer(folder, merges=()):
    """GPT2's bytes and some merges; `<|end|>` ends texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|mark|>"])
    return from_json(folder, backend, eos_token="<|end|>")


def byte_fallback_tokenizer(folder):
    """Llama's form: `▁` for blanks, bytes for what has no piece, the first blank is dropped."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["<unk>", "<s>", "</s>", "▁", *(f"<0x{number:02X}>" for number in range(256)), *"abcdehlnortuwy"]
    vocab = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return from_json(folder, backend, bos_token="<s>", eos_token="</s>")


def saying(prompt, answer, vocab_size, **arguments):
    """TableRunner that continues `prompt` (ids) with `answer` (ids), surely."""
    said = [*prompt, *answer]

    def logits(ids):
        values = np.zeros(vocab_size, np.float32)
        if len(ids) < len(said) and ids == said[: len(ids)]:
            values[said[len(ids)]] = 50
        return values

    return TableRunner(vocab_size, logits=logits, **arguments)
