"""Tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json."""

import os

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.models.hugging_face.writer import write_json

_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens
_GPT2_SPLIT = None  # ByteLevel's own
_QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# tokenizer.ggml.pre: (split by this expression, every digit on its own)
_SPLITS = {
    "gpt-2": (_GPT2_SPLIT, False),
    "smollm": (_GPT2_SPLIT, True),
    "qwen2": (_QWEN2_SPLIT, False),
    "llama-bpe": (_LLAMA3_SPLIT, False),
}


def write_tokenizer(model, folder):
    """Write the tokenizer of a GgufModel into a folder.

    Returns:
        list[str]: a note, if its kind is not known and it was left out.

    Raises:
        CheckpointError: its tables contradict each other.
    """
    kind, split = model.value("tokenizer.ggml.model"), model.value("tokenizer.ggml.pre") or "gpt-2"
    if kind != "gpt2" or split not in _SPLITS:
        return [
            f"the tokenizer was left out: {model.path} has one of the kind {kind}, {split}; copy it from the model's folder"
        ]
    tokens, merges = model.value("tokenizer.ggml.tokens"), model.value("tokenizer.ggml.merges") or []
    kinds = model.value("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(set(tokens)) != len(tokens) or len(kinds) != len(tokens):
        raise CheckpointError(
            f"{model.path}: tokenizer.ggml.tokens has {len(tokens)} tokens, some of them twice or of no kind."
        )
    _byte_level_bpe(tokens, kinds, merges, *_SPLITS[split]).save(os.path.join(folder, "tokenizer.json"))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: model.value(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    settings = {f"{name}_token": tokens[number] for name, number in ids.items() if number is not None and number < len(tokens)}
    template = model.value("tokenizer.chat_template")
    write_json(
        os.path.join(folder, "tokenizer_config.json"),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": bool(model.value("tokenizer.ggml.add_bos_token")),
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.config["max_position_embeddings"],
            **settings,
            **({"chat_template": template} if template else {}),
        },
    )
    return []


def _byte_level_bpe(tokens, kinds, merges, split, single_digits):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, pairs))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder, tokenizer.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one, kind in zip(tokens, kinds) if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one, kind in zip(tokens, kinds) if kind == _USER_DEFINED])
    return tokenizer
