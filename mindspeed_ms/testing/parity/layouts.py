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

_EP2, _TP2SP = ("--expert-model-parallel-size", "2"), ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EXPERT_LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("ep2", 2, _EP2),
        Layout("ep2allgather", 2, (*_EP2, "--moe-token-dispatcher-type", "allgather")),
        Layout("ep2recompute", 2, (*_EP2, "--moe-layer-recompute")),
        Layout("ep2z3", 2, (*_EP2, "--zero-level", "z3")),
        Layout("ep4", 4, ("--expert-model-parallel-size", "4", "--micro-batch-size", "1")),
        Layout("dp4ep2distopt", 4, (*_EP2, "--micro-batch-size", "1", "--use-distributed-optimizer")),
        Layout("dp4ep2overlap", 4, (*_EP2, "--micro-batch-size", "1", "--overlap-grad-reduce")),
        Layout("dp4ep2z2", 4, (*_EP2, "--micro-batch-size", "1", "--zero-level", "z2", "--overlap-grad-reduce")),
        Layout("pp2ep2", 4, ("--pipeline-model-parallel-size", "2", *_EP2)),
        Layout("pp2vpp2ep2", 4, (*LAYOUTS["pp2vpp2"].flags, *_EP2, "--micro-batch-size", "1")),
        Layout("tp2spep2", 4, (*_TP2SP, *_EP2)),
        Layout("tp2spep2allgather", 4, (*_TP2SP, *_EP2, "--moe-token-dispatcher-type", "allgather")),
        Layout("tp2spep2etp1", 2, (*_TP2SP, *_EP2, "--expert-tensor-parallel-size", "1")),
    )
}
"""Layouts of mixtures of experts."""

FEATURES = {
    "single_mtp": ("tp1", "tp2", "tp2sp", "dp2", "tp2dp2distopt", "dp2z3", "pp2", "pp2vpp2"),
    "single_qk_norm": ("tp1", "tp2", "tp2sp", "dp2", "tp2dp2distopt", "pp2"),
    "single_llama31": ("tp1", "tp2sp", "pp2"),
    "single_per_token": ("tp1", "tp2sp", "dp2", "pp2"),
    "single_mixtral": ("tp1", "tp2sp", "dp2", "pp2vpp2", "ep2", "ep2allgather", "ep2z3", "pp2ep2", "tp2spep2etp1"),
    "single_moe_sigmoid": ("tp1", "tp2sp", "ep2", "ep2recompute", "pp2ep2", "tp2spep2", "tp2spep2allgather"),
    "single_moe_drop_probs": ("tp1", "tp2sp", "ep2", "pp2ep2", "tp2spep2", "tp2spep2etp1"),
}
"""Layouts of recordings that are not replayed in all layouts of dense models."""


def layouts_of(name):
    """Layouts in which the recording `name` is replayed."""
    return [(LAYOUTS | EXPERT_LAYOUTS)[layout] for layout in FEATURES.get(name, LAYOUTS)]


def tensor_parallel_limit(recording):
    """Largest tensor-parallel size that divides the recording's heads and key-value groups."""
    groups = recording.flag("--num-query-groups") if "--group-query-attention" in recording.flags else None
    return int(groups or recording.flag("--num-attention-heads"))


def padded_vocabulary(recording, tensor_parallel_size):
    """Rows of the embedding: NullTokenizer's ids and end of document, padded as Megatron does."""
    multiple = int(recording.flag("--make-vocab-size-divisible-by", 128)) * tensor_parallel_size
    size = int(recording.flag("--vocab-size")) + 1
    return -(-size // multiple) * multiple
