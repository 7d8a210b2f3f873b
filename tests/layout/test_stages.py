"""Layers per stage and chunk, layer lists, recompute lists."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_ms.config import ModelParallelConfig, TransformerConfig
from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.layer_lists import LayerRecompute, RecomputeLists, parse_layer_list, recompute_of_layers
from mindspeed_ms.layout.stages import StageLayout, recompute_of, split_evenly, split_layers

GUIDE_LIST = "[[4,4,4,4],[4,4,4,4],[4,4,4,4],[4,4,4,2]]"


def _model(num_layers=8, **parallel):
    sizes = {"vocab_size": 8, "num_layers": num_layers, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8}
    return describe_model(TransformerConfig(**sizes, seq_length=8, parallel_config=ModelParallelConfig(**parallel)))


def _all_positions(stages):
    return sorted(p for s in range(stages.pp) for c in range(stages.vpp) for p in stages.positions(s, c))


def test_remainder_goes_to_the_stages_before_the_last():
    assert split_evenly(62, 4) == [15, 16, 16, 15]
    assert split_evenly(7, 4) == [2, 2, 2, 1]
    assert split_layers(62, 4).stage_totals == [15, 16, 16, 15]


def test_virtual_split_goes_over_chunks_first():
    stages = split_layers(62, 4, 4)
    assert stages.stage_totals == [16, 16, 16, 14]
    assert stages.counts[3] == (3, 4, 4, 3)
    assert list(stages.positions(0, 1)) == [15, 16, 17, 18]


def test_chunk_major_numbers():
    stages = split_layers(8, 2, 2)
    assert stages.layers(0, 0) == [0, 1]
    assert stages.layers(1, 0) == [2, 3]
    assert stages.layers(0, 1) == [4, 5]
    assert stages.layers(1, 1) == [6, 7]
    assert stages.owner(5) == (0, 1)
    assert stages.has_embedding(0, 0) and not stages.has_embedding(0, 1)
    assert stages.has_head(1, 1) and not stages.has_head(1, 0)


def test_guide_list():
    stages = split_layers(62, 4, None, GUIDE_LIST)
    assert stages.vpp == 4
    assert stages.stage_totals == [16, 16, 16, 14]
    assert stages.layers(3, 3) == [60, 61]
    assert "stage 3: 14 layers: 12-15 | 28-31 | 44-47 | 60-61" in stages.table()


def test_upstream_order_transposes():
    rows = [[1, 2, 3], [4, 5, 6]]  # two chunks of three stages
    stages = split_layers(21, 3, 2, rows, order="vpp_pp")
    assert stages.counts == ((1, 4), (2, 5), (3, 6))


def test_standalone_embedding_stage():
    stages = split_layers(8, 3, standalone_embedding=True)
    assert stages.stage_totals == [0, 4, 4]
    assert split_layers(8, 3, None, [5, 3], standalone_embedding=True).stage_totals == [0, 5, 3]
    assert split_layers(8, 3, None, [0, 5, 3], standalone_embedding=True).stage_totals == [0, 5, 3]
    with pytest.raises(LayoutError, match="gives layers to the standalone embedding stage"):
        split_layers(8, 3, None, [1, 4, 3], standalone_embedding=True)
    with pytest.raises(LayoutError, match="needs pipeline_model_parallel_size > 1"):
        split_layers(8, 1, standalone_embedding=True)


def test_first_and_last_stage_counts():
    assert split_layers(14, 4, first_stage=3, last_stage=3).stage_totals == [3, 4, 4, 3]
    assert split_layers(10, 4, last_stage=1).stage_totals == [3, 3, 3, 1]
    assert split_layers(12, 4, 2, first_stage=2, last_stage=2).counts == ((1, 1), (2, 2), (2, 2), (1, 1))
    with pytest.raises(LayoutError, match="do not fit num_layers 5 on 2 stages"):
        split_layers(5, 2, first_stage=2, last_stage=2)
    with pytest.raises(LayoutError, match="divisible by the 2 chunks"):
        split_layers(12, 4, 2, first_stage=3)


def test_account_for_embedding_and_loss():
    assert split_layers(14, 4, account_for_embedding=True, account_for_loss=True).stage_totals == [3, 4, 4, 3]
    both = split_layers(14, 2, 4, account_for_embedding=True, account_for_loss=True)
    assert both.counts == ((1, 2, 2, 2), (2, 2, 2, 1))
    assert split_layers(3, 4, account_for_loss=True).stage_totals == [1, 1, 1, 0]


def test_noop_layers_hold_no_number():
    stages = split_layers(8, 2, noop_layers="0,5")
    assert stages.layer_slots(0) == [None, 0, 1, 2]
    assert stages.layer_slots(1) == [3, None, 4, 5]
    assert (stages.num_positions, stages.num_layers) == (8, 6)
    for noops, text in [("8", r"noop_layers \[8\] must be in \[0, num_layers 8\)"), ([1, 1], "twice"), ("x", "list of")]:
        with pytest.raises(LayoutError, match=text):
            split_layers(8, 2, noop_layers=noops)
    with pytest.raises(LayoutError, match="leave none"):
        split_layers(2, 2, noop_layers=[0, 1])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_layers": 3, "pp": 4}, "num_layers 3 is less than the 4 x 1"),
        ({"num_layers": 7, "pp": 2, "vpp": 4}, "2 x 4 = 8"),
        ({"num_layers": 8, "pp": 1, "vpp": 2}, "needs pipeline_model_parallel_size > 1"),
        ({"num_layers": 9, "pp": 2, "num_layer_list": [4, 4]}, r"num_layers is 9, but num_layer_list \[4, 4\] adds up to 8"),
        ({"num_layers": 8, "pp": 2, "num_layer_list": [8, 0]}, "positive numbers only"),
        ({"num_layers": 8, "pp": 4, "num_layer_list": [4, 4]}, r"shape \[2\]\[1\] .*has \[4\]"),
        ({"num_layers": 8, "pp": 2, "vpp": 2, "num_layer_list": [4, 4]}, r"has \[2\]\[2\]"),
        ({"num_layers": 8, "pp": 4, "num_layer_list": [[1] * 4, [1] * 4]}, "set num_layer_list_order to vpp_pp"),
        ({"num_layers": 8, "pp": 2, "num_layer_list": [4, 4], "first_stage": 4}, "exclude each other"),
        ({"num_layers": 8, "pp": 2, "num_layer_list": [4, 4], "order": "rows"}, "num_layer_list_order 'rows'"),
    ],
)
def test_split_errors(options, text):
    with pytest.raises(LayoutError, match=text):
        split_layers(**options)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("[[4,4],[4,2]", r"num_layer_list '\[\[4,4\],\[4,2\]' cannot be read; write it like"),
        ("__import__('os')", "cannot be read"),
        ("", "cannot be read"),
        ([], "must be a list"),
        (None, "must be a list"),
        ([[4, 4], [4]], r"rows of different length \(2 and 1\)"),
        ([4, [4]], "mixes counts and lists"),
        ([[4, 4], 4], "mixes counts and lists"),
        ([[4, 4.0]], "holds 4.0, but every element must be an integer"),
        ([True], "holds True"),
        (["4"], "holds '4'"),
    ],
)
def test_list_errors(value, text):
    with pytest.raises(LayoutError, match=text):
        parse_layer_list(value)


def test_list_forms():
    assert parse_layer_list("4,4,2") == [4, 4, 2]
    assert parse_layer_list("7") == [7]
    assert parse_layer_list(((1, 2), (3, 4))) == [[1, 2], [3, 4]]
    assert parse_layer_list(" [[4,4],[4,2]] ") == [[4, 4], [4, 2]]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), pp=st.integers(1, 8), vpp=st.integers(1, 4))
def test_every_layer_stands_in_one_place(data, pp, vpp):
    vpp = vpp if pp > 1 else 1
    if data.draw(st.booleans(), label="explicit"):
        counts = data.draw(st.lists(st.lists(st.integers(1, 5), min_size=vpp, max_size=vpp), min_size=pp, max_size=pp))
        total = sum(map(sum, counts))
        options = {"num_layer_list": str(counts)}
    else:
        total = data.draw(st.integers(pp * vpp, 100))
        options = {}
    noops = data.draw(st.sets(st.integers(0, total - 1), max_size=total - 1))
    stages = split_layers(total, pp, vpp, noop_layers=sorted(noops), **options)
    assert _all_positions(stages) == list(range(total))
    chunks = [(stage, chunk) for chunk in range(stages.vpp) for stage in range(stages.pp)]
    layers = [layer for stage, chunk in chunks for layer in stages.layers(stage, chunk)]
    assert layers == list(range(total - len(noops)))
    if not options:
        flat = [count for row in stages.counts for count in row]
        assert max(flat) - min(flat) <= 2
        assert stages.counts[-1][-1] == min(flat)


def test_recompute_kinds_in_order():
    full, both, comm, none = (
        LayerRecompute(full=True),
        LayerRecompute(select=True, select_comm=True),
        LayerRecompute(select_comm=True),
        LayerRecompute(),
    )
    assert recompute_of_layers(5, full=1, select=1, select_comm=3) == [full, both, comm, comm, none]
    assert recompute_of_layers(2) == [none, none]


def test_recompute_lists_follow_the_stages():
    stages = split_layers(62, 4, None, GUIDE_LIST)
    lists = RecomputeLists(stages, select_comm_recompute=GUIDE_LIST)
    assert lists.active
    assert lists.of_chunk(3, 3) == [LayerRecompute(select_comm=True)] * 2
    assert not RecomputeLists(stages).active
    flat = RecomputeLists(split_layers(8, 2), recompute=[1, 2], select_recompute=[3, 0])
    assert [kind.full for kind in flat.of_chunk(1)] == [True, True, False, False]
    assert [kind.select for kind in flat.of_chunk(0)] == [False, True, True, True]


@pytest.mark.parametrize(
    ("lists", "text"),
    [
        ({"recompute": [-1, 0]}, "recompute .*holds -1, but a number of layers cannot be negative"),
        ({"recompute": [1]}, r"recompute \[1\] has the shape \[1\]\[1\]"),
        ({"recompute": [5, 0]}, "recompute 5 .* exceeds its 4"),
        ({"recompute": [2, 2], "select_recompute": [3, 1]}, r"recompute 2 \+ select_recompute 3 on stage 0"),
        ({"recompute": [2, 2], "select_comm_recompute": [0, 3]}, "select_comm_recompute 3 on stage 1"),
    ],
)
def test_recompute_errors(lists, text):
    with pytest.raises(LayoutError, match=text):
        RecomputeLists(split_layers(8, 2), **lists)


def test_from_description():
    model = _model(
        62,
        pipeline_model_parallel_size=4,
        num_layer_list=GUIDE_LIST,
        num_layers_per_virtual_pipeline_stage=4,
        virtual_pipeline_model_parallel_size=4,
        recompute_config={"select_recompute": GUIDE_LIST},
    )
    assert model.stages.vpp == 4
    assert recompute_of(model).of_chunk(0, 0) == [LayerRecompute(select=True)] * 4
    per_chunk = _model(16, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2)
    assert per_chunk.stages.vpp == 4
    with pytest.raises(LayoutError, match="num_layers 62 is not divisible by 4 stages x num_layers_per_virtual"):
        _ = _model(62, pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=4).stages
    with pytest.raises(LayoutError, match="contradicts"):
        _ = _model(
            16, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2, virtual_pipeline_model_parallel_size=2
        ).stages


def test_stage_layout_checks_itself():
    for counts in ([], [[]], [[1, 2], [1]], [[-1]]):
        with pytest.raises(LayoutError):
            StageLayout(counts)
    with pytest.raises(LayoutError, match="outside the 1 stages"):
        StageLayout([[1]]).offset(1)
    with pytest.raises(LayoutError, match="layer 9 is outside"):
        StageLayout([[1]]).owner(9)
