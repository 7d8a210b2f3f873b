"""Parallel layouts in which recordings are replayed, and supported features of recordings."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Parallel layout: name, world size and Megatron flags."""

    name: str
    world: int
    flags: tuple

    @property
    def tensor_parallel_size(self):
        """Tensor-parallel size."""
        name = "--tensor-model-parallel-size"
        return int(self.flags[self.flags.index(name) + 1]) if name in self.flags else 1


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("tp1", 1, ()),
        Layout("tp2", 2, ("--tensor-model-parallel-size", "2")),
        Layout("tp2sp", 2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
        Layout("dp2", 2, ()),
        Layout("tp2dp2", 4, ("--tensor-model-parallel-size", "2")),
        Layout("tp2dp2distopt", 4, ("--tensor-model-parallel-size", "2", "--use-distributed-optimizer")),
        Layout("dp2z3", 2, ("--zero-level", "z3")),
        Layout("tp4", 4, ("--tensor-model-parallel-size", "4")),
        Layout("tp4sp", 4, ("--tensor-model-parallel-size", "4", "--sequence-parallel")),
        Layout("pp2", 2, ("--pipeline-model-parallel-size", "2")),
        Layout("pp2vpp2", 2, ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1")),
        Layout(
            "tp2sppp2", 4, ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2")
        ),
        Layout("pp4", 4, ("--pipeline-model-parallel-size", "4")),
    )
}

LATER_FLAGS = ("--num-experts", "--mtp-num-layers")
"""Flags of features that this package refuses for now; recordings with them are not collected."""


def is_available(recording):
    """Whether the package supports every feature of a recording."""
    return not any(flag in recording.flags for flag in LATER_FLAGS)


FEATURES = {
    "single_qk_norm": ("tp1", "tp2", "tp2sp", "dp2", "tp2dp2distopt", "pp2"),
    "single_llama31": ("tp1", "tp2sp", "pp2"),
    "single_per_token": ("tp1", "tp2sp", "dp2", "pp2"),
}
"""Layouts of recordings that differ in one feature from one that is replayed in all layouts."""


def layouts_of(name):
    """Layouts in which the recording `name` is replayed."""
    return [LAYOUTS[layout] for layout in FEATURES.get(name, LAYOUTS)]


def tensor_parallel_limit(recording):
    """Largest tensor-parallel size that divides the recording's heads and key-value groups."""
    groups = recording.flag("--num-query-groups") if "--group-query-attention" in recording.flags else None
    return int(groups or recording.flag("--num-attention-heads"))


def padded_vocabulary(recording, tensor_parallel_size):
    """Rows of the embedding: NullTokenizer's ids and end of document, padded as Megatron does."""
    multiple = int(recording.flag("--make-vocab-size-divisible-by", 128)) * tensor_parallel_size
    size = int(recording.flag("--vocab-size")) + 1
    return -(-size // multiple) * multiple
