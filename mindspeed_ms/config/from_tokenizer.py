"""Settings from the tokenizer's files: size of the vocabulary and end-of-document token, where the user does not give them."""

from mindspeed_ms.config.errors import Problem
from mindspeed_ms.config.sections.dataset import TOKENIZERS

_D = "dataset_config"
_NAMES = ("tokenizer_name_or_path", "tokenizer_model", "vocab_file", "merge_file", "tokenizer_type")
# only these need to know where a document ends
_ENDS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "mock_data")


def ask_tokenizer(settings):
    """Fill `dataset_config.vocab_size` and `eos_token_id` from the tokenizer, as Megatron does.

    The files are read only where one of them is needed and not set: a configuration that gives the padded vocabulary can be
    checked on a machine without them.

    Args:
        settings (Settings): changed in place; a tokenizer that cannot be read becomes a problem of its option.
    """
    has_model = any(path.startswith("model_config.") for path in settings.by_path)
    wants_size = has_model and not any(settings.value(f"{name}.vocab_size") for name in ("model_config", _D))
    wants_end = settings.value(f"{_D}.eos_token_id") is None and any(settings.value(f"{_D}.{name}") for name in _ENDS)
    named = [settings.by_path[f"{_D}.{name}"] for name in _NAMES if settings.value(f"{_D}.{name}")]
    if not named or not (wants_size or wants_end) or not _is_well_formed(settings):
        return
    tokenizer = _read(settings, named[0])
    if tokenizer is None:
        return
    if wants_size:
        # the padding adds the extra ids again
        size = tokenizer.vocab_size - settings.value(f"{_D}.vocab_extra_ids", 0)
        settings.add(f"{_D}.vocab_size", size, named[0].key, named[0].place)
    if wants_end and tokenizer.eod is not None:
        settings.add(f"{_D}.eos_token_id", tokenizer.eod, named[0].key, named[0].place)
        settings.notices.append(f"token {tokenizer.eod} ends documents, as {tokenizer.name} says")


def _is_well_formed(settings):
    """False if a value is of a wrong type, which the sections report."""
    kind, extra = settings.value(f"{_D}.tokenizer_type"), settings.value(f"{_D}.vocab_extra_ids", 0)
    words = [settings.value(f"{_D}.{name}", "") for name in _NAMES]
    return kind in (None, *TOKENIZERS) and isinstance(extra, int) and all(isinstance(word, str) for word in words)


def _read(settings, setting):
    # the one place where the configuration needs the tokenizers, which import no MindSpore
    from mindspeed_ms.core.datasets.tokenizer import TokenizerError, TokenizerSettings, build_tokenizer

    options = TokenizerSettings(
        **{name: settings.value(f"{_D}.{name}") for name in (*_NAMES, "vocab_size")},
        vocab_extra_ids=settings.value(f"{_D}.vocab_extra_ids", 0),
        use_fast=settings.value(f"{_D}.use_fast_tokenizer", True) is not False,
    )
    try:
        return build_tokenizer(options)
    except TokenizerError as error:
        message = f"is to say the vocabulary's size or the end of documents, but cannot be read: {error}"
        settings.problems.append(Problem(setting.key, message, setting.value, setting.place))
    return None
