"""SentencePieceTokenizer: tokenizers of the `sentencepiece` library."""

import json
import os
import re
from functools import cached_property

from mindspeed_ms.core.datasets.tokenizer.interface import Tokenizer, TokenizerError, check_characters, wrap

_MEGATRON_TOKENS = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model, with tokens added behind it.

    The model decides about the space in front of a text (Llama's has one), about byte fallback and about normalising. A
    text is cut at added tokens; each piece of text between them is encoded by itself.

    Args:
        path (str): the model.
        adds_bos, adds_eos (bool): see Tokenizer.
        space_behind_tokens (bool): put the space in front of every piece of text (Llama's first, "legacy" behaviour);
            otherwise only where the text itself begins, as the slow LlamaTokenizer of transformers 4 with `legacy` false.

    Attributes:
        named (set[str]): without `space_behind_tokens`: tokens in front of which a text's own space is left out.

    Raises:
        TokenizerError: the file is damaged or no sentencepiece model.
    """

    def __init__(self, path, adds_bos=False, adds_eos=False, space_behind_tokens=True):
        self.name = f"the sentencepiece model {path}"
        self._model = _load(path)
        self._no_space = None if space_behind_tokens else _without_leading_space(path)
        self._vocab = {self._model.id_to_piece(number): number for number in range(self._model.vocab_size())}
        self._inverse = {number: token for token, number in self._vocab.items()}
        self._added, self._pattern, self._special = {}, None, set()
        self.bos, self.eos, self.pad = (
            number if number >= 0 else None for number in (self._model.bos_id(), self._model.eos_id(), self._model.pad_id())
        )
        self.adds_bos, self.adds_eos = adds_bos, adds_eos
        self.named = {self._inverse[number] for number in (self.bos, self.eos, self._model.unk_id()) if number is not None}

    @property
    def vocab_size(self):
        """See Tokenizer."""
        return max(self._inverse) + 1

    @property
    def vocab(self):
        """See Tokenizer."""
        return self._vocab

    @property
    def inv_vocab(self):
        """See Tokenizer."""
        return self._inverse

    @cached_property
    def _control(self):
        return {number for number in range(self._model.vocab_size()) if self._model.is_control(number)}

    @property
    def special_ids(self):
        """See Tokenizer."""
        return super().special_ids | self._control | {self._vocab[token] for token in self._special if token in self._vocab}

    def encode_batch(self, texts, add_special_tokens=True):
        """See Tokenizer."""
        texts = list(texts)
        try:
            encoded = self._model.encode(texts) if self._pattern is None else [self._encode_pieces(text) for text in texts]
        except (TypeError, RuntimeError):
            check_characters(texts)
            raise
        return [wrap(ids, self) for ids in encoded] if add_special_tokens else encoded

    def _encode_pieces(self, text):
        if self._no_space is not None and text:
            text = "▁" + text.replace("▁", " ")
        ids, start = [], 0
        for match in self._pattern.finditer(text):
            ids += self._encode_plain(text[start : match.start()])
            ids.append(self._vocab[match[match.lastindex]])
            start = match.end()
        ids += self._encode_plain(text[start:])
        first = [self._inverse[number] for number in ids[:2]]
        return ids[1:] if self._no_space is not None and first[:1] == ["▁"] and first[-1] in self.named else ids

    def _encode_plain(self, piece):
        if not piece:
            return []
        if self._no_space is None:
            return self._model.encode(piece)
        if not piece.startswith((" ", "▁")):
            return self._no_space.encode(piece)
        # the model may drop blanks where a text begins, so a prefix is put in front and removed again
        front = self._model.id_to_piece(self._model.unk_id())
        return self._no_space.encode(front + piece)[len(self._no_space.encode(front)) :]

    def detokenize(self, ids):
        """See Tokenizer."""
        ids = [int(number) for number in ids]
        self.check_ids(ids)
        text, run = "", []
        for number in ids:
            token = self._inverse.get(number, "")
            if token in self._added or number in (self.bos, self.eos, self.pad):
                text += self._decode(run, text) + token
                run = []
            else:
                run.append(number)
        return text + self._decode(run, text)

    def _decode(self, run, text_before):
        """Decode ids; keep the space in front that the model drops, if the ids continue a text without such spaces."""
        if not run:
            return ""
        has_space = bool(text_before) and self._no_space is not None and self._inverse[run[0]].startswith("▁")
        return (" " if has_space else "") + self._model.decode(run)

    def content(self):
        """See Tokenizer."""
        rules = [sorted(self._vocab.items()), sorted(self._added.items()), self._no_space is None, sorted(self.named)]
        return self._model.serialized_model_proto() + json.dumps(rules).encode()

    def token_to_id(self, token):
        """See Tokenizer."""
        return self._vocab.get(token)

    def add_special_tokens(self, tokens, lstrip=False, rstrip=False, special=True):
        """See Tokenizer. With `lstrip` or `rstrip` a token swallows the blanks on that side; `special`: it is no text."""
        new = []
        self._special.update(tokens if special else ())
        for token in tokens:
            if token not in self._vocab:
                new.append(token)
                self.set_token(token, self.vocab_size)
            if token not in self._added:
                self._added[token] = r"\s*" * lstrip + f"({re.escape(token)})" + r"\s*" * rstrip
        longest_first = sorted(self._added, key=len, reverse=True)
        self._pattern = re.compile("|".join(self._added[token] for token in longest_first)) if self._added else None
        return new

    def set_token(self, token, number):
        """Give a token the id `number`, behind the model's vocabulary or in place of a piece."""
        self._vocab.pop(self._inverse.get(number), None)
        self._vocab[token], self._inverse[number] = number, token


def llama2(path, vocab_extra_ids=0):
    """Megatron's Llama2Tokenizer: begins every text with BOS; EOS ends a document."""
    del vocab_extra_ids
    return SentencePieceTokenizer(path, adds_bos=True)


def gpt_sentence_piece(path, vocab_extra_ids=0):
    """Megatron's GPTSentencePieceTokenizer: the model's ids and nothing else; EOS ends a document."""
    del vocab_extra_ids
    return SentencePieceTokenizer(path)


class _MegatronSentencePiece(SentencePieceTokenizer):
    """Sentencepiece tokenizer whose documents end with `<EOD>`, which is not the end token of sentences."""

    @property
    def eod(self):
        return self.vocab["<EOD>"]


def megatron_sentence_piece(path, vocab_extra_ids=0):
    """Megatron's SentencePieceTokenizer: `<CLS> <SEP> <EOD> <MASK>`, a padding token and `<extra_id_N>` are added behind the
    model's ids; `<EOD>` ends a document."""
    tokenizer = _MegatronSentencePiece(path)
    inverse = tokenizer.inv_vocab
    named = [inverse.get(tokenizer.pad, "<PAD>"), inverse.get(tokenizer.bos, "<BOS>"), inverse.get(tokenizer.eos, "<EOS>")]
    tokenizer.add_special_tokens([*_MEGATRON_TOKENS, *named, *(f"<extra_id_{number}>" for number in range(vocab_extra_ids))])
    tokenizer.pad, tokenizer.bos, tokenizer.eos = (tokenizer.vocab[token] for token in named)
    return tokenizer


def _load(path):
    from sentencepiece import SentencePieceProcessor

    if os.path.getsize(path) == 0:
        raise TokenizerError(f"the sentencepiece model {path} is empty.")
    try:
        return SentencePieceProcessor(model_file=path)
    except (RuntimeError, OSError) as error:
        raise TokenizerError(
            f"{path} is no sentencepiece model, or damaged ({error}): copy it again, or name a "
            "tokenizer.json as --tokenizer-type PretrainedFromHF."
        ) from error


def _without_leading_space(path):
    """Copy of the model that puts no space in front of a text."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    with open(path, "rb") as file:
        proto = sentencepiece_model_pb2.ModelProto.FromString(file.read())
    proto.normalizer_spec.add_dummy_prefix = False
    return SentencePieceProcessor(model_proto=proto.SerializeToString())
