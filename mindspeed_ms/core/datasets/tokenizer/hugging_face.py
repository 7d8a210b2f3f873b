"""Tokenizers in Hugging Face folders, without `transformers`: `tokenizer.json` or a sentencepiece model, and their settings.

Rules. A token's role comes from `tokenizer_config.json`, else from `special_tokens_map.json`. Whether BOS and EOS are put
around a text: `add_bos_token` and `add_eos_token` of `tokenizer_config.json` if one is there, else, and always for the class
PreTrainedTokenizerFast, the post-processor inside `tokenizer.json`. Without an end token `<|endoftext|>` serves, if it is in
the vocabulary. Without a padding token `pad` is None.
"""

import json
import os

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from mindspeed_ms.core.datasets.tokenizer.fast import FastTokenizer, read_backend
from mindspeed_ms.core.datasets.tokenizer.interface import TokenizerError
from mindspeed_ms.core.datasets.tokenizer.sentence_piece import SentencePieceTokenizer
from mindspeed_ms.core.logging import logger

END_OF_TEXT = "<|endoftext|>"
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
_BY_POST_PROCESSOR = ("PreTrainedTokenizerFast", "TokenizersBackend")
_BYTE_LEVEL = ("GPT2Tokenizer", "GPT2TokenizerFast")


def from_folder(path, use_fast=True):
    """Tokenizer of a Hugging Face folder, or of a `tokenizer.json` (and the settings beside it).

    Args:
        path (str): folder or file; nothing is downloaded.
        use_fast (bool): prefer `tokenizer.json`; otherwise a sentencepiece model (`tokenizer.model`) is used if there is one.

    Raises:
        TokenizerError: no such folder, no tokenizer in it, damaged files, tokens whose ids disagree.
    """
    if not os.path.exists(path):
        raise TokenizerError(
            f"--tokenizer-name-or-path is {path}: there is no such folder or file (looked for "
            f"{os.path.abspath(path)}; nothing is downloaded from a hub)."
        )
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    settings = _Settings(folder)
    fast = path if not os.path.isdir(path) else os.path.join(folder, "tokenizer.json")
    if fast.endswith(".model"):
        return _from_sentence_piece(fast, settings)
    model = os.path.join(folder, "tokenizer.model")
    if os.path.isfile(model) and (not use_fast or not os.path.isfile(fast)):
        return _from_sentence_piece(model, settings)
    if os.path.isfile(fast):
        if not use_fast:
            logger.info("use_fast_tokenizer is off, but %s has no tokenizer.model: tokenizer.json is used", folder)
        return _with_settings(read_backend(fast), fast, settings)
    return _from_vocab_and_merges(folder, settings)


def gpt2_tokenizer(vocab_file, merge_file, settings=None):
    """GPT2's byte-level BPE. `<|endoftext|>` ends a document and begins a text; in the text itself it is plain text.

    Args:
        vocab_file, merge_file (str): `vocab.json` and `merges.txt`.

    Raises:
        TokenizerError: a file is damaged, or the vocabulary has no `<|endoftext|>`.
    """
    try:
        backend = Backend(models.BPE.from_file(vocab_file, merge_file))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(
            f"{vocab_file} and {merge_file} are no GPT2 vocabulary and merges ({error}): expected a json "
            "object of tokens and ids, and a text file of pairs."
        ) from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(backend.get_vocab()))
    if missing:
        logger.warning(
            "%s lacks %d of the 256 bytes: text that has them loses them (first: %r)", vocab_file, len(missing), missing[0]
        )
    if settings is not None:
        return _with_settings(backend, vocab_file, settings)
    tokenizer = FastTokenizer(backend, f"the GPT2 tokenizer {vocab_file}", adds_bos=False)
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise TokenizerError(f"{vocab_file} has no {END_OF_TEXT}: a GPT2 vocabulary ends documents with it.")
    tokenizer.set_roles(bos=END_OF_TEXT, eos=END_OF_TEXT)
    return tokenizer


class _Settings:
    """Token settings in the json files of a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.path, map_path = (os.path.join(folder, name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
        self.config, self._map = _read_json(self.path), _read_json(map_path)
        self._sources = ((self.path, self.config), (map_path, self._map))
        templates = self._chat_templates()
        self.chat_template = templates.get("default")
        self.tool_chat_template = templates.get("tool_use")

    def token(self, role):
        """The token (Optional[str]) of a role such as "eos"."""
        for path, source in self._sources:
            value = source.get(f"{role}_token")
            if value is not None:
                return _token(value, path, f"{role}_token")
        return None

    def additional_special_tokens(self):
        """Tokens (list[str]) of `additional_special_tokens`."""
        key = "additional_special_tokens"
        for path, source in self._sources:
            if source.get(key):
                _expect(isinstance(source[key], list), path, key, source[key], "a list of tokens")
                return [_token(token, path, key) for token in source[key]]
        return []

    def added_tokens(self):
        """Id, content and flags of all added tokens: list of (int, str, dict), by id."""
        added, key = {}, "added_tokens_decoder"
        path = os.path.join(self.folder, "added_tokens.json")
        for token, number in _read_json(path).items():
            _expect(type(number) is int, path, token, number, "an id")
            added[number] = token, {}
        entries = self.config.get(key) or {}
        _expect(isinstance(entries, dict), self.path, key, entries, "an object of ids and tokens")
        for number, entry in entries.items():
            _expect(number.isdecimal() and isinstance(entry, dict), self.path, key, {number: entry}, "an id and an object")
            flags = {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}
            added[int(number)] = _token(entry, self.path, key), flags
        return [(number, *added[number]) for number in sorted(added)]

    def around(self):
        """`add_bos_token` and `add_eos_token`; None for one that is missing or that the class ignores."""
        if self.config.get("tokenizer_class") in _BY_POST_PROCESSOR:
            return None, None
        return self.config.get("add_bos_token"), self.config.get("add_eos_token")

    def _chat_templates(self):
        """Jinja templates by name (dict[str, str]): "default", and for some models "tool_use"."""
        key, names = "chat_template", {"chat_template.jinja": "default", "additional_chat_templates/tool_use.jinja": "tool_use"}
        found = {name: _read_text(os.path.join(self.folder, file)) for file, name in names.items()}
        templates = self.config.get(key) or []
        if isinstance(templates, str):
            templates = [{"name": "default", "template": templates}]
        _expect(isinstance(templates, list), self.path, key, templates, "a template or a list of them")
        for entry in templates:
            usable = isinstance(entry, dict) and all(isinstance(entry.get(part), str) for part in ("name", "template"))
            _expect(usable, self.path, key, entry, "an object of a name and a template")
        given = {entry["name"]: entry["template"] for entry in templates}
        return given | {name: text for name, text in found.items() if text is not None}


def _token(value, path, key):
    """Text of a token, which a file gives as a text or as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    _expect(isinstance(text, str), path, key, value, "one token, a text or an object with its content")
    return text


def _expect(holds, path, key, value, expected):
    if not holds:
        raise TokenizerError(f"{path}: {key} is {value!r:.80}, expected {expected}. Correct it there.")


def _read_text(path):
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is no UTF-8 text ({error}): copy it again.") from error


def _read_json(path):
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except ValueError as error:
        raise TokenizerError(f"{path} is no json file, or damaged ({error}): copy it again.") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} holds a {type(content).__name__}: expected a json object.")
    return content


def _with_settings(backend, path, settings):
    tokenizer = FastTokenizer(backend, f"the tokenizer {path}", *settings.around())
    for number, content, flags in settings.added_tokens():
        if tokenizer.token_to_id(content) != number:
            tokenizer.add_token(content, number, **flags)
    bos, eos, pad = settings.token("bos"), settings.token("eos"), settings.token("pad")
    if eos is None and tokenizer.token_to_id(END_OF_TEXT) is not None:
        logger.info("%s names no eos_token: %s ends texts and documents", tokenizer.name, END_OF_TEXT)
        eos = END_OF_TEXT
    tokenizer.set_roles(bos, eos, pad)
    _check_around(tokenizer)
    tokenizer.chat_template, tokenizer.tool_chat_template = settings.chat_template, settings.tool_chat_template
    return tokenizer


def _from_sentence_piece(path, settings):
    """Tokenizer like the slow Llama one: BOS unless `add_bos_token` is false; `legacy` adds spaces behind special tokens."""
    adds_bos, adds_eos = settings.around()
    legacy = settings.config.get("legacy")
    tokenizer = SentencePieceTokenizer(path, adds_bos is not False, bool(adds_eos), legacy is None or bool(legacy))
    own = [tokenizer.inv_vocab[number] for number in (tokenizer.bos, tokenizer.eos) if number is not None]
    for number, content, flags in settings.added_tokens():
        if tokenizer.token_to_id(content) != number:
            tokenizer.set_token(content, number)
        sides = flags.get("lstrip", False), flags.get("rstrip", False)
        tokenizer.add_special_tokens([content], *sides, special=flags.get("special", True))
    tokenizer.add_special_tokens(own)
    for role in ("bos", "eos", "pad"):
        token = settings.token(role)
        if token is None:
            continue
        tokenizer.add_special_tokens([token])
        setattr(tokenizer, role, tokenizer.token_to_id(token))
        tokenizer.named.add(token)
    tokenizer.named.update(settings.additional_special_tokens())
    _check_around(tokenizer)
    tokenizer.chat_template, tokenizer.tool_chat_template = settings.chat_template, settings.tool_chat_template
    return tokenizer


def _from_vocab_and_merges(folder, settings):
    vocab, merges = (os.path.join(folder, name) for name in ("vocab.json", "merges.txt"))
    found = ", ".join(sorted(os.listdir(folder))[:10]) or "nothing"
    if not (os.path.isfile(vocab) and os.path.isfile(merges)):
        raise TokenizerError(
            f"--tokenizer-name-or-path is {folder}: it has no tokenizer.json, no tokenizer.model and no "
            f"vocab.json with merges.txt. Found there: {found}."
        )
    kind = settings.config.get("tokenizer_class", _BYTE_LEVEL[0])
    if kind not in _BYTE_LEVEL:
        raise TokenizerError(
            f"{folder} has vocab.json and merges.txt of a {kind}, whose rules are in no file: add its "
            "tokenizer.json (transformers writes one with save_pretrained)."
        )
    return gpt2_tokenizer(vocab, merges, settings)


def _check_around(tokenizer):
    for word, adds, number in (("bos", tokenizer.adds_bos, tokenizer.bos), ("eos", tokenizer.adds_eos, tokenizer.eos)):
        if adds and number is None:
            raise TokenizerError(
                f"{tokenizer.name}: add_{word}_token is true, but there is no {word}_token. Name it in tokenizer_config.json."
            )
