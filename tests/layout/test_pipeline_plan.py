"""Pipeline plans are complete, causal, free of deadlock, and as fast as the theory says."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mindspeed_ms.config import ModelParallelConfig, TransformerConfig
from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.layout import pipeline_plan
from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.pipeline_plan import (
    BACKWARD,
    FORWARD,
    Communicate,
    Compute,
    PlanDeadlock,
    build_plan,
    describe,
    draw_png,
    draw_text,
    peak_live_activations,
    plan_of,
    simulate,
)
from mindspeed_ms.layout.schedule_order import compute_order, dependency


@st.composite
def plans(draw, forward_only=None):
    pp, vpp = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    vpp = vpp if pp > 1 else 1
    group = draw(st.integers(pp, 2 * pp)) if draw(st.booleans()) else None
    micro_batches = draw(st.integers(1, 14))
    rest = micro_batches % (group or pp)
    assume(vpp == 1 or rest == 0 or rest >= pp)
    only = draw(st.booleans()) if forward_only is None else forward_only
    return build_plan(pp, micro_batches, vpp, group, only, draw(st.booleans()))


@settings(max_examples=120, deadline=None)
@given(plans())
def test_each_computation_runs_once(plan):
    kinds = [FORWARD] if plan.forward_only else [FORWARD, BACKWARD]
    for stage in range(plan.pp):
        wanted = {
            Compute(kind, micro_batch, chunk)
            for kind in kinds
            for micro_batch in range(plan.micro_batches)
            for chunk in range(plan.vpp)
        }
        computes = plan.computes(stage)
        assert len(computes) == len(wanted) and set(computes) == wanted
        for micro_batch in range(0 if plan.forward_only else plan.micro_batches):
            for chunk in range(plan.vpp):
                forward = computes.index(Compute(FORWARD, micro_batch, chunk))
                assert forward < computes.index(Compute(BACKWARD, micro_batch, chunk))


@settings(max_examples=120, deadline=None)
@given(plans())
def test_transfers_match_in_order_and_surround_their_computations(plan):
    for one in range(plan.pp):
        for other in range(plan.pp):
            sent = [(t.kind, t.micro_batch) for t in plan.transfers(one) if (t.action, t.peer) == ("send", other)]
            received = [(t.kind, t.micro_batch) for t in plan.transfers(other) if (t.action, t.peer) == ("recv", one)]
            assert sent == received
    for stage in range(plan.pp):
        done, held = set(), set()
        for step in plan.steps[stage]:
            if isinstance(step, Communicate):
                for transfer in step.transfers:
                    work = Compute(transfer.kind, transfer.micro_batch, transfer.chunk)
                    if transfer.action == "send":
                        assert work in done
                    else:
                        assert work not in held | done
                        held.add(work)
                continue
            source = dependency(plan.pp, plan.vpp, stage, step)
            if source is None or source[0] == stage:
                assert source is None or source[1] in done
            else:
                assert step in held
            held.discard(step)
            done.add(step)
        assert not held


@settings(max_examples=120, deadline=None)
@given(plans(), st.sampled_from([0, 1, 2, None]), st.integers(0, 3), st.integers(0, 2))
def test_no_deadlock_whatever_is_buffered(plan, buffering, backward_time, transfer_time):
    result = simulate(plan, 1, backward_time, transfer_time, buffering)
    ends = {(stage, step): stop for stage, row in enumerate(result.spans) for step, _, stop in row}
    for stage, row in enumerate(result.spans):
        clock = 0
        for step, start, stop in row:
            assert start >= clock
            clock = stop
            source = dependency(plan.pp, plan.vpp, stage, step)
            if source is not None:
                assert start >= ends[source] + (transfer_time if source[0] != stage else 0)


@settings(max_examples=120, deadline=None)
@given(plans(), st.sampled_from([0, 1, None]), st.sampled_from([0.5, 1, 2, 3]))
def test_bubble_is_the_theory(plan, buffering, backward_time):
    result = simulate(plan, 1, backward_time, 0, buffering)
    assert result.bubble == pytest.approx((plan.pp - 1) / (plan.micro_batches * plan.vpp))


@settings(max_examples=60, deadline=None)
@given(plans(forward_only=False))
def test_live_activations(plan):
    peaks = peak_live_activations(plan)
    for stage, peak in enumerate(peaks):
        if plan.vpp == 1:
            assert peak == min(plan.pp - stage, plan.micro_batches)
        else:
            bound = 2 * (plan.pp - stage - 1) + (plan.vpp - 1) * plan.group_size + 1
            assert peak == min(bound, plan.micro_batches * plan.vpp)


def test_1f1b_by_hand():
    plan = build_plan(2, 3)
    f, b = (lambda m: Compute(FORWARD, m, 0)), (lambda m: Compute(BACKWARD, m, 0))
    assert plan.computes(0) == [f(0), f(1), b(0), f(2), b(1), b(2)]
    assert plan.computes(1) == [f(0), b(0), f(1), b(1), f(2), b(2)]
    assert [(t.action, t.kind, t.micro_batch) for t in plan.transfers(0)] == [
        ("send", FORWARD, 0), ("recv", BACKWARD, 0), ("send", FORWARD, 1),
        ("recv", BACKWARD, 1), ("send", FORWARD, 2), ("recv", BACKWARD, 2),
    ]  # fmt: skip
    assert plan.last_backwards(0) == {0: b(2)}


def test_interleaved_by_hand():
    # two stages, two chunks, groups of two: micro-batches 0 1 0 1 2 3 2 3 through chunks 0 0 1 1 0 0 1 1
    order = compute_order(0, 2, 4, 2, 2)
    forwards = [(step.micro_batch, step.chunk) for step in order if step.kind == FORWARD]
    backwards = [(step.micro_batch, step.chunk) for step in order if step.kind == BACKWARD]
    assert forwards == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    assert backwards == [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]
    kinds = "".join("F" if step.kind == FORWARD else "B" for step in order)
    assert kinds == "FFFF" + "FB" * 4 + "BBBB"
    assert compute_order(1, 2, 4, 2, 2)[:4] == [*order[:3], Compute(BACKWARD, 0, 1)]


def test_first_and_last():
    plan = build_plan(2, 2, 2)
    assert plan.is_first(0, 0) and not plan.is_first(0, 1)
    assert plan.is_last(1, 1) and not plan.is_last(1, 0)
    assert build_plan(1, 2).transfers(0) == []


def test_simulator_finds_a_deadlock_and_a_mismatch():
    plan = build_plan(2, 2)
    backwards = replace(plan, steps=(plan.steps[0], tuple(reversed(plan.steps[1]))))
    with pytest.raises(PlanDeadlock):
        simulate(backwards, buffering=0)
    one, other = build_plan(2, 2, forward_only=True), build_plan(2, 1, forward_only=True)
    with pytest.raises(PlanDeadlock, match="stage 0 waits in: send of the forward tensor of micro-batch 1"):
        simulate(replace(one, steps=(one.steps[0], other.steps[1])), buffering=0)
    with pytest.raises(ValueError, match="buffering must be"):
        simulate(plan, buffering=-1)


def test_costs_per_stage_and_chunk():
    plan = build_plan(2, 4)
    result = simulate(plan, forward_time=[[1], [3]], backward_time=[[2], [6]])
    assert result.busy(1) == 36
    assert result.total == 39
    assert result.idle_fractions[1] == pytest.approx(3 / 39)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pp": 1, "micro_batches": 2, "vpp": 2}, "needs pipeline_model_parallel_size > 1"),
        ({"pp": 4, "micro_batches": 6, "vpp": 2}, "6 micro-batches in groups of 4 leave a last group of 2"),
        ({"pp": 4, "micro_batches": 4, "vpp": 2, "group_size": 3}, "3 must be at least pipeline_model_parallel_size 4"),
        ({"pp": 0, "micro_batches": 4}, "pp must be a positive integer"),
        ({"pp": 2, "micro_batches": 0}, "micro_batches must be a positive integer"),
    ],
)
def test_errors(options, text):
    with pytest.raises(LayoutError, match=text):
        build_plan(**options)


def test_drawing(tmp_path):
    result = simulate(build_plan(2, 2, 2), backward_time=2)
    lines = draw_text(result).splitlines()
    assert lines[0].split()[:4] == ["stage", "0", "F0a", "F1a"]
    assert lines[1].split()[:4] == ["stage", "1", ".", "F0a"]
    assert "bubble 25.00%" in result.summary()
    assert draw_text(simulate(build_plan(1, 2))).split() == ["stage", "0", "F0", "B0", "=", "F1", "B1", "="]
    assert describe(build_plan(4, 8, forward_only=True)) == "forward only, pp 4, vpp 1, 8 micro-batches"
    pytest.importorskip("matplotlib")
    draw_png(result, str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_command(capsys):
    assert pipeline_plan.main(["--pp", "4", "--vpp", "2", "--micro", "8"]) == 0
    text = capsys.readouterr().out
    assert "interleaved 1F1B, groups of 4" in text and "bubble 18.75%" in text
    assert "stage 0: idle 15.79%, peak live activations 11" in text
    assert pipeline_plan.main(["--pp", "4", "--vpp", "2", "--micro", "6"]) == 1
    assert "leave a last group of 2" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["forward", "backward", "transfer"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_times_that_make_no_sense_are_refused(capsys, name, value):
    assert pipeline_plan.main(["--pp", "2", "--micro", "2", f"--{name}-time={value}"]) == 1
    assert f"{name}_time must be a finite number >= 0" in capsys.readouterr().err


def test_from_config():
    parallel = ModelParallelConfig(
        pipeline_model_parallel_size=2,
        num_layers_per_virtual_pipeline_stage=2,
        microbatch_group_size_per_virtual_pipeline_stage=4,
    )
    sizes = {"vocab_size": 8, "num_layers": 8, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8}
    model = describe_model(TransformerConfig(**sizes, seq_length=8, parallel_config=parallel))
    plan = plan_of(model, 8)
    assert (plan.pp, plan.vpp, plan.group_size, plan.micro_batches) == (2, 2, 4, 8)


def test_room_imports_neither_mindspore_nor_numpy():
    code = (
        "import sys, mindspeed_ms.layout.parameters, mindspeed_ms.layout.pipeline_plan\n"
        "heavy = {'mindspore', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "others = [m for m in sys.modules if m.startswith('mindspeed_ms.') and not m.startswith('mindspeed_ms.layout')]\n"
        "assert not heavy and not others, (heavy, others)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
