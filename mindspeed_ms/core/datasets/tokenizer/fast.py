"""FastTokenizer: tokenizers of the `tokenizers` library."""

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from mindspeed_ms.core.datasets.tokenizer.interface import Tokenizer, TokenizerError, check_characters, wrap


class FastTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` behind our interface.

    Args:
        backend (tokenizers.Tokenizer): vocabulary, normalizer, merges, special tokens.
        name (str): see Tokenizer.
        adds_bos, adds_eos (Optional[bool]): whether texts get these tokens; None for both: as the backend's own post-processor
            does.
    """

    def __init__(self, backend, name, adds_bos=None, adds_eos=None):
        self.name = name
        self._backend, self._size = backend, None
        backend.no_padding()
        backend.no_truncation()
        self._by_backend = adds_bos is None and adds_eos is None
        self.adds_bos, self.adds_eos = bool(adds_bos), bool(adds_eos)

    def set_roles(self, bos=None, eos=None, pad=None):
        """Set the begin, end and padding tokens (Optional[str]).

        Raises:
            TokenizerError: a token that is not in the vocabulary.
        """
        for role, token in (("bos", bos), ("eos", eos), ("pad", pad)):
            if token is None:
                continue
            number = self.token_to_id(token)
            if number is None:
                raise TokenizerError(
                    f"{self.name}: {role}_token is {token!r}, which is not in the vocabulary of "
                    f"{self.vocab_size} ids. Correct tokenizer_config.json or add the token there."
                )
            setattr(self, role, number)
        if self._by_backend:
            around = self._backend.encode("a").ids
            self.adds_bos = self.bos is not None and around[:1] == [self.bos]
            self.adds_eos = self.eos is not None and around[-1:] == [self.eos]

    @property
    def vocab_size(self):
        """See Tokenizer."""
        if self._size is None:
            vocab = self._backend.get_vocab(with_added_tokens=True)
            self._size = max(vocab.values(), default=-1) + 1
        return self._size

    @property
    def vocab(self):
        """See Tokenizer."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def special_ids(self):
        """See Tokenizer."""
        added = self._backend.get_added_tokens_decoder()
        return super().special_ids | {number for number, token in added.items() if token.special}

    def encode_batch(self, texts, add_special_tokens=True):
        """See Tokenizer."""
        by_backend = add_special_tokens and self._by_backend
        texts = list(texts)
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=by_backend)
        except TypeError:
            check_characters(texts)
            raise
        if add_special_tokens and not by_backend:
            return [wrap(encoding.ids, self) for encoding in encodings]
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids):
        """See Tokenizer."""
        ids = [int(number) for number in ids]
        self.check_ids(ids)
        return self._backend.decode(ids, skip_special_tokens=False)

    def content(self):
        """See Tokenizer."""
        return self._backend.to_str()

    def token_to_id(self, token):
        """See Tokenizer."""
        return self._backend.token_to_id(token)

    def add_special_tokens(self, tokens):
        """See Tokenizer."""
        new = [token for token in dict.fromkeys(tokens) if self.token_to_id(token) is None]
        self._backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
        self._size = None
        return new

    def add_token(self, content, number, **flags):
        """Add one token (str) of a Hugging Face folder, which must get the id `number`.

        Raises:
            TokenizerError: it gets another one.
        """
        add = self._backend.add_special_tokens if flags.get("special") else self._backend.add_tokens
        add([AddedToken(content, **flags)])
        self._size = None
        if self.token_to_id(content) != number:
            raise TokenizerError(
                f"{self.name}: added token {content!r} should have id {number}, but the vocabulary gives it "
                f"{self.token_to_id(content)}. tokenizer_config.json and tokenizer.json do not belong "
                "together: copy both from one place."
            )


def read_backend(path):
    """The `tokenizers.Tokenizer` in a `tokenizer.json`.

    Raises:
        TokenizerError: the file is damaged or something else.
    """
    try:
        return Backend.from_file(path)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} is no tokenizer.json, or damaged ({error}): copy it again.") from error
