"""NullTokenizer: numbers separated by blanks, for data that is ids already. Source of the rules: Megatron's NullTokenizer."""

from mindspeed_ms.core.datasets.tokenizer.interface import Tokenizer, TokenizerError


class NullTokenizer(Tokenizer):
    """Tokenizer that reads "3 1 4" as [3, 1, 4]. The id behind the vocabulary ends a document.

    Args:
        vocab_size (int): ids are below it, except for the end of document, which is equal to it.
    """

    def __init__(self, vocab_size):
        self.name = f"NullTokenizer of {vocab_size} ids"
        self._size = int(vocab_size)
        self.eos = self._size

    @property
    def vocab_size(self):
        """Size of the vocabulary: the ids and the end of document."""
        return self._size + 1

    @property
    def vocab(self):
        """Vocabulary: each number, as text, and its value."""
        return {str(number): number for number in range(self.vocab_size)}

    def encode_batch(self, texts, add_special_tokens=True):
        """See Tokenizer.

        Raises:
            TokenizerError: a word is no number, or not below the vocabulary size.
        """
        return [self._numbers(text) for text in texts]

    def _numbers(self, text):
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise TokenizerError(f"{self.name} reads numbers separated by blanks, but the text is {text[:60]!r}.") from error
        self.check_ids(ids)
        return ids

    def detokenize(self, ids):
        """Text of the numbers, separated by blanks."""
        return " ".join(str(int(number)) for number in ids)

    def content(self):
        """See Tokenizer."""
        return self.name

    def token_to_id(self, token):
        """Id of a number written as text, or None."""
        return int(token) if token.isdecimal() and int(token) < self.vocab_size else None

    def add_special_tokens(self, tokens):
        """Raise an error: a vocabulary of numbers takes no further tokens.

        Raises:
            TokenizerError: always, if there are any.
        """
        if tokens:
            raise TokenizerError(f"{self.name} cannot have the token {tokens[0]!r}: templates need a tokenizer of text.")
        return []
