"""Builder of the tokenizer of a configuration. Types and rules: Megatron's `build_tokenizer`."""

import os

from mindspeed_ms.core.datasets.tokenizer.hugging_face import from_folder, gpt2_tokenizer
from mindspeed_ms.core.datasets.tokenizer.interface import TokenizerError
from mindspeed_ms.core.datasets.tokenizer.null import NullTokenizer
from mindspeed_ms.core.datasets.tokenizer.sentence_piece import gpt_sentence_piece, llama2, megatron_sentence_piece
from mindspeed_ms.core.datasets.tokenizer.settings import TokenizerSettings
from mindspeed_ms.core.logging import logger
from mindspeed_ms.layout.vocabulary import padded_vocab_size

_NEEDS_MODEL = {
    "Llama2Tokenizer": llama2,
    "GPTSentencePieceTokenizer": gpt_sentence_piece,
    "SentencePieceTokenizer": megatron_sentence_piece,
}


def build_tokenizer(settings):
    """Build the tokenizer that `settings` (TokenizerSettings, or a DatasetConfig) name.

    Returns:
        Tokenizer

    Raises:
        TokenizerError: a value is missing, or a file is missing, damaged or of another kind; the message names the option
            and the file.
    """
    if not isinstance(settings, TokenizerSettings):
        settings = TokenizerSettings.from_config(settings)
    kind = settings.tokenizer_type or _told_from_files(settings)
    if kind in ("PretrainedFromHF", "HuggingFaceTokenizer"):
        path = settings.tokenizer_name_or_path or settings.tokenizer_model
        return from_folder(_given(path, kind, "--tokenizer-name-or-path"), settings.use_fast)
    if kind in _NEEDS_MODEL:
        option = "--tokenizer-model"
        path = _file(_given(settings.tokenizer_model or settings.tokenizer_name_or_path, kind, option), option)
        return _NEEDS_MODEL[kind](path, settings.vocab_extra_ids)
    if kind == "GPT2BPETokenizer":
        return gpt2_tokenizer(
            _file(_given(settings.vocab_file, kind, "--vocab-file"), "--vocab-file"),
            _file(_given(settings.merge_file, kind, "--merge-file"), "--merge-file"),
        )
    if kind == "NullTokenizer":
        return NullTokenizer(_given(settings.vocab_size, kind, "--vocab-size"))
    known = ["PretrainedFromHF", "HuggingFaceTokenizer", *_NEEDS_MODEL, "GPT2BPETokenizer", "NullTokenizer"]
    raise TokenizerError(f"tokenizer_type (--tokenizer-type) is {kind!r}: expected one of {', '.join(known)}.")


def model_vocab_size(tokenizer, make_vocab_size_divisible_by=128, tensor_model_parallel_size=1):
    """Vocabulary size of a model for `tokenizer`, padded as Megatron does; logs one line.

    Args:
        tokenizer (Tokenizer): its `vocab_size` counts added tokens.
        make_vocab_size_divisible_by, tensor_model_parallel_size (int): the padded size is a multiple of their product.

    Returns:
        int: rows of the word embeddings.
    """
    padded = padded_vocab_size(tokenizer.vocab_size, make_vocab_size_divisible_by, tensor_model_parallel_size)
    logger.info(
        "vocabulary of %s: %d ids, padded to %d (%d unused; a multiple of make_vocab_size_divisible_by %d * tp %d)",
        tokenizer.name,
        tokenizer.vocab_size,
        padded,
        padded - tokenizer.vocab_size,
        make_vocab_size_divisible_by,
        tensor_model_parallel_size,
    )
    return padded


def _told_from_files(settings):
    path = settings.tokenizer_name_or_path or settings.tokenizer_model
    if path:
        return "GPTSentencePieceTokenizer" if path.endswith(".model") else "PretrainedFromHF"
    if settings.vocab_file:
        return "GPT2BPETokenizer"
    raise TokenizerError(
        "no tokenizer is named: give --tokenizer-type and --tokenizer-name-or-path FOLDER (or "
        "--tokenizer-model FILE, or --vocab-file and --merge-file)."
    )


def _given(value, kind, option):
    if not value:
        raise TokenizerError(f"tokenizer_type {kind} needs {option}, which is not given.")
    return value


def _file(path, option):
    if not os.path.exists(path):
        raise TokenizerError(f"{option} is {path}: there is no such file.")
    if os.path.isdir(path):
        raise TokenizerError(f"{option} is {path}: that is a folder, expected a file.")
    return path
