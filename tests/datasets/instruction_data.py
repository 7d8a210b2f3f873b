"""Instruction data as preprocessing writes it."""

import numpy as np

from mindspeed_ms.core.datasets.indexed_dataset import IndexedDatasetBuilder
from mindspeed_ms.core.datasets.instruction_files import field_prefix


def write_field(prefix, field, sequences):
    name = field_prefix(prefix, field)
    with IndexedDatasetBuilder(name + ".bin", np.int32) as builder:
        for sequence in sequences:
            builder.add_document(sequence)
        builder.finalize(name + ".idx")


def write_sft(prefix, samples):
    """`samples`: list of (ids, labels, attention mask)."""
    ids, labels, masks = zip(*samples)
    write_field(prefix, "input_ids", ids)
    write_field(prefix, "labels", labels)
    write_field(prefix, "attention_mask", masks)
    return str(prefix)


def conversation(random, source, target, vocab_size=100):
    """Ids and labels of one turn."""
    ids = random.randint(1, vocab_size, source + target).tolist()
    return ids, [-100] * source + ids[source:]


def neat_pack(conversations, length, pad=0):
    """One packed sample: (ids, labels, attention mask)."""
    ids, labels, mask = [], [], []
    for number, (new, learnt) in enumerate(conversations, 1):
        ids += new
        labels += learnt
        mask += [number] * len(new)
    fill = length - len(ids)
    return ids + [pad] * fill, labels + [-100] * fill, mask + [0] * fill
