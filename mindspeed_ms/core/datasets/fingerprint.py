"""Fingerprints of tokenizer and data, by their content: a checkpoint keeps them, so that a run that continues can compare.

Moved or renamed files have the same fingerprint. Of large files equally distant blocks are read.
"""

import hashlib
import os

from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset, get_bin_path, get_idx_path

_BLOCK = 1 << 16
_BLOCKS_OF_DATA = 512  # files up to 32 MiB are read whole


def sampled_hash(path, most_blocks=64):
    """Hash (str) of a file, or of equally distant blocks of a large one (64 KiB each, `most_blocks` of them)."""
    size, digest = os.path.getsize(path), hashlib.blake2b(digest_size=16)
    blocks = min(-(-size // _BLOCK), most_blocks)
    with open(path, "rb") as file:
        for block in range(blocks):
            file.seek((size - _BLOCK) * block // (blocks - 1) if size > _BLOCK * most_blocks else block * _BLOCK)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def hash_of(*parts):
    """Short hash (str) of texts, bytes, numbers."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, (bytes, memoryview)) else str(part).encode()
        digest.update(f"{len(data)} ".encode())
        digest.update(data)
    return digest.hexdigest()


def of_tokenizer(tokenizer):
    """Fingerprint of a Tokenizer (dict): name, vocab_size, and the hash of all that decides ids."""
    ends = [getattr(tokenizer, name) for name in ("eos", "adds_bos", "adds_eos")]
    begin = tokenizer.bos if tokenizer.adds_bos else None
    hashed = hash_of(tokenizer.content(), tokenizer.vocab_size, begin, *ends)
    return {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size, "hash": hashed}


def of_indexed_files(prefix):
    """Fingerprint of indexed files (dict): path, documents, tokens and hash.

    Raises:
        FileNotFoundError, IndexedDatasetError: as IndexedDataset.
    """
    dataset = IndexedDataset(prefix)
    paths = get_bin_path(prefix), get_idx_path(prefix)
    content = [item for path in paths for item in (os.path.getsize(path), sampled_hash(path, _BLOCKS_OF_DATA))]
    return {
        "path": prefix,
        "documents": len(dataset.document_indices) - 1,
        "tokens": int(dataset.sequence_lengths.sum(dtype="int64")),
        "hash": hash_of(*content),
    }


def of_tokens(tokens, documents):
    """Fingerprint of encoded text (dict): documents, tokens and hash.

    Args:
        tokens (np.ndarray): ids of all documents.
        documents (int): how many.
    """
    return {"documents": documents, "tokens": len(tokens), "hash": hash_of(memoryview(tokens).cast("B"))}
