"""Vocabulary size and its padding, which `config/resolve.py` applies. Source: Megatron's `_vocab_size_with_padding`."""


def true_vocab_size(vocab_size, extra_ids=0, tokenizer_type=None):
    """Vocabulary rows before padding: own ids, extra ids, and the end-of-document token of Megatron's NullTokenizer."""
    return vocab_size + (extra_ids or 0) + (tokenizer_type == "NullTokenizer")


def padded_vocab_size(vocab_size, divisible_by, tensor_parallel_size):
    """Padded vocabulary size: `vocab_size` rounded up to a multiple of `divisible_by * tensor_parallel_size`."""
    unit = divisible_by * tensor_parallel_size
    return -(-vocab_size // unit) * unit
