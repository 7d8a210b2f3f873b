"""Interface of all tokenizers."""

import json
import re
from abc import ABC, abstractmethod

from mindspeed_ms.core.datasets.errors import DatasetError


class TokenizerError(DatasetError):
    """Tokenizer that cannot be built or lacks a token; the message names the file and says what to do."""


_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer(ABC):
    """Tokenizer interface: text to ids and back.

    Attributes:
        name (str): type and place, for messages.
        bos, eos, pad (Optional[int]): ids of the begin, end and padding tokens, None if the tokenizer has none. `pad` is
            what the tokenizer's own files say; `use_eos_as_pad` makes it the end token, as upstream does for templates.
        adds_bos, adds_eos (bool): whether `tokenize` puts them around a text without being asked.
        chat_template (Optional[str]): the jinja template in the tokenizer's folder.
        tool_chat_template (Optional[str]): the one for conversations with tools, where the folder has one of its own.
    """

    name = ""
    bos = eos = pad = None
    adds_bos = adds_eos = False
    chat_template = tool_chat_template = None

    @property
    @abstractmethod
    def vocab_size(self):
        """Size of the vocabulary (int): one more than the largest id, added tokens included, before padding for a model."""

    @property
    @abstractmethod
    def vocab(self):
        """Vocabulary: token -> id (dict[str, int]), added tokens included."""

    @property
    def inv_vocab(self):
        """Inverse vocabulary: id -> token (dict[int, str])."""
        return {number: token for token, number in self.vocab.items()}

    @property
    def special_ids(self):
        """Ids (frozenset[int]) of tokens that are marks and no text, such as the begin and end tokens."""
        return frozenset(number for number in (self.bos, self.eos, self.pad) if number is not None)

    @property
    def eod(self):
        """Id that ends a document: the end token, unless the type has another (`SentencePieceTokenizer`, `NullTokenizer`).

        Raises:
            TokenizerError: the tokenizer has none.
        """
        if self.eos is None:
            raise TokenizerError(
                f"{self.name} has no end-of-sequence token, so documents cannot be ended: name it as "
                "eos_token in tokenizer_config.json beside the tokenizer."
            )
        return self.eos

    def tokenize(self, text, add_special_tokens=True):
        """Ids (list[int]) of a text.

        Args:
            text (str): any text; added tokens that it spells out become their ids.
            add_special_tokens (bool): put begin and end tokens where the tokenizer's own settings ask for them.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    @abstractmethod
    def encode_batch(self, texts, add_special_tokens=True):
        """`tokenize` of many texts (list[str]) at once: list[list[int]].

        Raises:
            TokenizerError: a text that cannot be encoded.
        """

    @abstractmethod
    def detokenize(self, ids):
        """Text of ids (iterable of int), special tokens included.

        Raises:
            TokenizerError: an id is not in the vocabulary.
        """

    def content(self):
        """All that decides the ids of a text (str or bytes), for fingerprints; more than the vocabulary where there is more."""
        return json.dumps(sorted(self.vocab.items()))

    def other_ids(self, other):
        """In words, how many tokens of `other` have another id here, with the first of them; None: all have the same."""
        own, others = self.vocab, other.vocab  # some make it anew each time
        moved = [(number, token) for token, number in others.items() if own.get(token) != number]
        if not moved:
            return None
        number, token = min(moved)
        here = own.get(token)
        return f"{len(moved)} of {len(others)} tokens, {token!r} is {'none' if here is None else here} in place of {number}"

    @abstractmethod
    def token_to_id(self, token):
        """Id of the token with exactly this text, or None."""

    @abstractmethod
    def add_special_tokens(self, tokens):
        """Make these strings (list[str]) single tokens; unknown ones get ids behind the vocabulary.

        Returns:
            list[str]: those that were not in the vocabulary before.
        """

    def use_eos_as_pad(self):
        """Pad with the end token if there is no padding token. Labels come from disk, so the end is still learnt."""
        if self.pad is None:
            self.pad = self.eos

    def check_ids(self, ids):
        """Raise TokenizerError if an id (iterable of int) is not in the vocabulary."""
        outside = [int(number) for number in ids if not 0 <= number < self.vocab_size]
        if outside:
            raise TokenizerError(
                f"id {outside[0]} is outside the vocabulary of {self.name}, which has the ids 0 to {self.vocab_size - 1}."
            )


def check_characters(texts):
    """Raise TokenizerError if one of these texts has a lone surrogate, which JSON can spell but UTF-8 cannot hold."""
    for text in texts:
        found = _SURROGATE.search(text)
        if found:
            start, around = found.start(), text[max(found.start() - 20, 0) : found.end() + 20]
            raise TokenizerError(
                f"character {start + 1} of the text ({around!r}) is U+{ord(found[0]):04X}, half of a surrogate pair without "
                "the other half, which is no character: the text was cut inside of one. Remove or complete it."
            )


def wrap(ids, tokenizer):
    """Add the begin and end tokens of `tokenizer` to `ids`."""
    begin = [tokenizer.bos] if tokenizer.adds_bos else []
    return begin + ids + ([tokenizer.eos] if tokenizer.adds_eos else [])
