"""Small data and tokenizer files for the runs of this folder."""

import json
import os
import shutil

import numpy as np

from tests.rows.job import END, LENGTH, VOCABULARY


def write_data(folder):
    """Indexed files `first` and `second` of random documents, and conversations under the same prefixes."""
    from mindspeed_ms.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from tests.datasets.instruction_data import conversation, write_sft

    os.makedirs(folder)
    for seed, name in enumerate(("first", "second")):
        random, prefix = np.random.RandomState(seed), os.path.join(folder, name)
        with IndexedDatasetBuilder(prefix + ".bin", np.uint16) as builder:
            for _ in range(40):
                builder.add_document([*random.randint(END + 1, VOCABULARY, random.randint(8, LENGTH)), END])
            builder.finalize(prefix + ".idx")
        chats = [conversation(random, 3, random.randint(2, LENGTH - 5), VOCABULARY) for _ in range(20)]
        write_sft(prefix, [(ids, labels, [1] * len(ids)) for ids, labels in chats])


def write_tokenizers(folder):
    """Folders `small` and `large`: tokenizer.json, a sentencepiece model and GPT2's two files, of other sizes in each."""
    from sentencepiece import SentencePieceTrainer
    from tokenizers import Tokenizer, models, pre_tokenizers

    for name, more in (("small", 1), ("large", 9)):
        place = os.path.join(folder, name)
        os.makedirs(place)
        tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"<{number}>" for number in range(more)), "<|endoftext|>"]
        vocab = {token: number for number, token in enumerate(tokens)}
        Tokenizer(models.BPE(vocab, [])).save(os.path.join(place, "tokenizer.json"))
        with open(os.path.join(place, "vocab.json"), "w", encoding="utf-8") as file:
            json.dump(vocab, file)
        with open(os.path.join(place, "merges.txt"), "w", encoding="utf-8") as file:
            file.write("#version: 0.2\n")
        SentencePieceTrainer.train(
            sentence_iterator=iter(["the end of a line and another one"] * 20),
            vocab_size=20 + more,
            model_type="bpe",
            model_prefix=os.path.join(place, "tokenizer"),
            hard_vocab_limit=False,
            minloglevel=2,
        )


def damage(saved, damaged):
    """A copy of a folder of checkpoints with one byte of the newest one's weights changed."""
    shutil.copytree(saved, damaged)
    newest = os.path.join(damaged, max(name for name in os.listdir(damaged) if name.startswith("iter_")))
    largest = max((os.path.join(newest, name) for name in os.listdir(newest)), key=os.path.getsize)
    with open(largest, "r+b") as file:
        file.seek(os.path.getsize(largest) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 255]))
