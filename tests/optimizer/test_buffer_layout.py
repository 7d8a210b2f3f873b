"""Places of parameters in flat buffers; no tensors."""

import math

from hypothesis import given
from hypothesis import strategies as st

from mindspeed_ms.core.distributed.buffer_layout import alignments, plan_buffer


def test_parameters_lie_in_reverse_order_and_buckets_close_at_their_size():
    layout = plan_buffer([10, 20, 5, 8], bucket_size=12)
    assert [(placed.index, placed.start, placed.stop, placed.bucket) for placed in layout.parameters] == [
        (3, 0, 8, 0),
        (2, 8, 13, 0),
        (1, 13, 33, 1),
        (0, 33, 43, 2),
    ]
    assert layout.buckets == ((0, 13), (13, 33), (33, 43))


def test_distributed_optimizer_uses_megatrons_padding():
    layout = plan_buffer([100, 30], None, *alignments(2, 4, True, False))
    assert [(placed.start, placed.stop) for placed in layout.parameters] == [(0, 30), (64, 164)]
    assert layout.numel == 256 and layout.numel_unpadded == 130
    assert alignments(3, 4, True, False) == (64, 384)
    assert alignments(1, 4, False, True) == (128, 128)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.one_of(st.none(), st.integers(1, 400)),
    st.sampled_from([1, 64]),
    st.sampled_from([1, 128]),
    st.data(),
)
def test_any_layout_is_complete_and_aligned(sizes, bucket_size, parameter_alignment, bucket_alignment, data):
    alone = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=2))
    layout = plan_buffer(sizes, bucket_size, parameter_alignment, bucket_alignment, alone)
    assert sorted(placed.index for placed in layout.parameters) == list(range(len(sizes)))
    assert layout.numel_unpadded == sum(sizes)
    end = 0
    for placed in layout.parameters:
        assert placed.start >= end and placed.start % parameter_alignment == 0
        assert placed.stop - placed.start == sizes[placed.index]
        start, stop = layout.buckets[placed.bucket]
        assert start <= placed.start and placed.stop <= stop
        end = placed.stop
    assert layout.buckets[0][0] == 0 and layout.buckets[-1][1] == layout.numel
    for (_, stop), (start, _) in zip(layout.buckets, layout.buckets[1:]):
        assert stop == start and stop % bucket_alignment == 0
    for index in alone:
        bucket = next(placed.bucket for placed in layout.parameters if placed.index == index)
        assert sum(placed.bucket == bucket for placed in layout.parameters) == 1
    assert math.isclose(layout.numel % bucket_alignment, 0)
