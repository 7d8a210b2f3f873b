"""Cuts of a sequence over ranks: every position once, equal shares, the ring's order, and lengths that do not fit."""

from types import SimpleNamespace

import pytest

from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.sequence import SequenceCut, sequence_unit, ulysses_degree
from mindspeed_ms.layout.sequence_messages import attention_messages

CUTS = [SequenceCut(u, r) for u in (1, 2, 3, 4) for r in (1, 2, 3, 4)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_ranks_share_every_position(cut):
    length = 6 * cut.unit
    held = [[place for span in cut.spans(rank, length) for place in range(*span)] for rank in range(cut.size)]
    assert {len(places) for places in held} == {length // cut.size}
    assert all(places == sorted(places) for places in held)
    assert sorted(place for places in held for place in places) == list(range(length))
    for ring_rank in range(cut.ring):
        group = held[ring_rank * cut.ulysses : (ring_rank + 1) * cut.ulysses]
        whole = [place for span in cut.ring_spans(ring_rank, length) for place in range(*span)]
        assert [place for places in group for place in places] == whole


def test_a_ring_balances_the_causal_mask():
    assert SequenceCut(1, 2).spans(0, 16) == [(0, 4), (12, 16)] and SequenceCut(1, 2).spans(1, 16) == [(4, 12)]
    pairs = [sum(place + 1 for span in SequenceCut(1, 4).spans(rank, 64) for place in range(*span)) for rank in range(4)]
    assert len(set(pairs)) == 1


def test_a_length_that_does_not_fit_names_the_padding():
    with pytest.raises(LayoutError, match="multiple of 4; pad it by 3 to 100"):
        SequenceCut(1, 2).spans(0, 97)


def test_whole_sequences_are_cut_by_no_algorithm():
    for algorithm, degree in (("megatron_cp_algo", None), ("ulysses_cp_algo", None), ("hybrid_cp_algo", 4)):
        alone = {"context_parallel_size": 1, "tensor_model_parallel_size": 1, "cuts_sequence": False}
        parallel = SimpleNamespace(**alone, context_parallel_algo=algorithm, ulysses_degree_in_cp=degree)
        assert sequence_unit(parallel) == ulysses_degree(parallel) == 1


def test_bytes_sent():
    ring = attention_messages(SequenceCut(1, 2), 64, 1, 4, 2, 8)
    assert ring.forward == 32 * 2 * 16 * 4 and ring.backward == ring.forward * 3
    ulysses = attention_messages(SequenceCut(4, 1), 64, 1, 4, 2, 8)  # two groups of keys go as four
    assert ulysses.forward == ulysses.backward == 16 * (4 + 4) * 16 * 4 * 3 // 4
    half = attention_messages(SequenceCut(1, 2), 64, 1, 4, 2, 8, item_bytes=2)
    assert half.forward == ring.forward // 2 and half.backward == half.forward + 2 * ring.forward
