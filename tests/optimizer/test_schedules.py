"""Learning rate, weight decay, loss scale and batch-size schedules; no tensors."""

import math
from types import SimpleNamespace

import pytest

from mindspeed_ms.config.schema import OptimizerConfig
from mindspeed_ms.core import num_microbatches_calculator as calculator
from mindspeed_ms.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from mindspeed_ms.core.optimizer.optimizer_param_scheduler import OptimizerParamScheduler

SETTINGS = {
    "init_lr": 0.0,
    "max_lr": 1e-2,
    "min_lr": 1e-3,
    "lr_warmup_steps": 10,
    "lr_decay_steps": 110,
    "lr_decay_style": "linear",
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_steps": 100,
    "wd_incr_style": "constant",
}


def schedule(groups=None, **changes):
    optimizer = SimpleNamespace(param_groups=groups or [{}])
    return OptimizerParamScheduler(optimizer, **{**SETTINGS, **changes}), optimizer.param_groups


def rate_at(steps, **changes):
    scheduler, groups = schedule(**changes)
    scheduler.step(steps)
    return groups[0]["lr"]


def test_recorded_rates_of_megatron_are_bit_equal():
    # recordings: global batch 4, lr 2e-3 to 2e-4 cosine over 10 iterations, 2 warm-up iterations
    scheduler, groups = schedule(max_lr=2e-3, min_lr=2e-4, lr_warmup_steps=8, lr_decay_steps=40, lr_decay_style="cosine")
    rates = []
    for _ in range(10):
        rates.append(groups[0]["lr"])
        scheduler.step(4)
    assert rates == [
        0.0,
        0.001,
        0.002,
        0.001931491579260158,
        0.0017363961030678928,
        0.001444415089128581,
        0.0011,
        0.0007555849108714192,
        0.0004636038969321073,
        0.00026850842073984193,
    ]


@pytest.mark.parametrize(
    "style, steps, expected",
    [
        ("constant", 0, 0.0),
        ("constant", 5, 5e-3),
        ("constant", 10, 1e-2),
        ("constant", 500, 1e-2),
        ("linear", 60, 1e-3 + 0.5 * 9e-3),
        ("linear", 110, 1e-3),
        ("linear", 111, 1e-3),
        ("cosine", 60, 1e-3 + 0.5 * 9e-3),
        ("cosine", 35, 1e-3 + 9e-3 * 0.5 * (math.cos(math.pi / 4) + 1)),
        ("inverse-square-root", 40, 5e-3),
        ("inverse-square-root", 110, max(1e-3, 1e-2 * math.sqrt(10 / 110))),
    ],
)
def test_rate_of_each_style(style, steps, expected):
    assert rate_at(steps, lr_decay_style=style) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "tail, expected", [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus_sqrt", 1 - math.sqrt(0.5))]
)
def test_wsd_holds_then_decays(tail, expected):
    changes = {"lr_decay_style": "WSD", "wsd_decay_steps": 20, "lr_wsd_decay_style": tail}
    assert rate_at(90, **changes) == pytest.approx(1e-2, rel=1e-15)
    assert rate_at(100, **changes) == pytest.approx(1e-3 + expected * 9e-3, rel=1e-12)
    assert rate_at(110, **changes) == pytest.approx(1e-3, rel=1e-12)


def test_groups_have_multipliers_and_limits_of_their_own():
    scheduler, groups = schedule([{"wd_mult": 0.0, "lr_mult": 2.0}, {"max_lr": 1.0, "min_lr": 0.5}], lr_decay_style="constant")
    scheduler.step(20)
    assert (groups[0]["lr"], groups[0]["weight_decay"]) == (2e-2, 0.0)
    assert (groups[1]["lr"], groups[1]["weight_decay"]) == (1.0, 0.1)


@pytest.mark.parametrize("style, expected", [("linear", 0.06), ("cosine", 0.01 + 0.09 * 0.5 * (math.cos(math.pi * 4 / 9) + 1))])
def test_weight_decay_grows(style, expected):
    scheduler, groups = schedule(start_wd=0.01, end_wd=0.1, wd_incr_style=style, wd_incr_steps=90)
    scheduler.step(50)
    assert groups[0]["weight_decay"] == pytest.approx(expected)
    scheduler.step(100)
    assert groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"min_lr": 1.0}, "min_lr is 1.0"),
        ({"lr_warmup_steps": 110}, "warm-up"),
        ({"lr_decay_steps": 0}, "lr_decay_steps is 0"),
        ({"lr_decay_style": "square"}, "'square'"),
        ({"lr_decay_style": "WSD"}, "lr_wsd_decay_iters"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 111, "lr_wsd_decay_style": "linear"}, "last part of WSD takes 111"),
        ({"start_wd": 0.2}, "start_weight_decay is 0.2"),
        ({"end_wd": 0.3}, "is constant but"),
        ({"override_opt_param_scheduler": True}, "are both set"),
        ({"init_lr": 1.0}, "lr_warmup_init is 1.0"),
    ],
)
def test_contradictions_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        schedule(**changes)


def test_lengths_of_a_configuration():
    """The warm-up is a fraction of the decay, not of the run; weight decay moves over the run."""

    def scheduler(**settings):
        optimizer = SimpleNamespace(param_groups=[{}])
        return OptimizerParamScheduler.from_config(optimizer, OptimizerConfig(**settings), batch=4, length=400)

    fraction = scheduler(lr_decay_iters=50, lr_warmup_fraction=0.1)
    assert (fraction.lr_warmup_steps, fraction.lr_decay_steps, fraction.wd_incr_steps) == (20, 200, 400)
    iterations = scheduler(lr_warmup_iters=3, lr_decay_style="WSD", lr_wsd_decay_iters=5, lr_wsd_decay_style="linear")
    assert (iterations.lr_warmup_steps, iterations.lr_decay_steps, iterations.wsd_decay_steps) == (12, 400, 20)


def test_load_takes_over_overrides_or_compares():
    saved, _ = schedule()
    saved.step(50)
    state = saved.state_dict()
    other, groups = schedule(max_lr=2e-2)
    other.load_state_dict(state)
    assert other.max_lr == 1e-2 and other.num_steps == 50 and groups[0]["lr"] == saved.get_lr()
    other, groups = schedule([{"max_lr": 2e-2}, {"max_lr": 2e-2, "is_decoupled_lr": True}], max_lr=2e-2)
    other.load_state_dict(state)
    assert [group["max_lr"] for group in groups] == [1e-2, 2e-2]
    kept, groups = schedule(max_lr=2e-2, use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True)
    kept.load_state_dict(state)
    assert kept.max_lr == 2e-2 and kept.num_steps == 50
    strict, _ = schedule(max_lr=2e-2, use_checkpoint_opt_param_scheduler=False)
    with pytest.raises(ValueError, match=r"max_lr is 0.02 but the checkpoint has 0.01"):
        strict.load_state_dict(state)


def test_dynamic_loss_scale_backs_off_after_hysteresis_and_grows_after_window():
    scaler = DynamicGradScaler(2.0**10, 2.0**8, 2.0, 0.5, 3, 2)
    scaler.update(True)
    assert scaler.scale == 2.0**10
    scaler.update(True)
    assert scaler.scale == 2.0**9
    for _ in range(3):
        scaler.update(True)
    assert scaler.scale == 2.0**8
    for _ in range(3):
        scaler.update(False)
    assert scaler.scale == 2.0**9
    for found_inf in (False, False, True, False, False):  # an overflow starts the count of finite steps anew
        scaler.update(found_inf)
    assert scaler.scale == 2.0**9
    scaler.update(False)
    assert scaler.scale == 2.0**10
    scaler.scale = 2.0**9
    other = DynamicGradScaler(2.0, 1.0, 2.0, 0.5, 3, 2)
    other.load_state_dict(scaler.state_dict())
    assert other.scale == 2.0**9


def test_loss_scale_settings_are_checked():
    with pytest.raises(ValueError, match=r"loss scale is 0\.0"):
        ConstantGradScaler(0.0)
    with pytest.raises(ValueError, match=r"backoff_factor of the loss scale is 1\.5"):
        DynamicGradScaler(2.0, 1.0, 2.0, 1.5, 3, 2)


@pytest.fixture
def batch_sizes():
    yield calculator.init_num_microbatches_calculator
    calculator.destroy_num_microbatches_calculator()


def test_number_of_micro_batches(batch_sizes):
    batch_sizes(1, None, 32, 2, 4)
    assert (calculator.get_num_microbatches(), calculator.get_micro_batch_size()) == (4, 2)
    batch_sizes(1, None, 30, 2, 4, decrease_batch_size_if_needed=True)
    assert calculator.get_current_global_batch_size() == 24


def test_batch_size_ramps_up(batch_sizes):
    batch_sizes(1, [8, 8, 300], 32, 2, 2)
    sizes = []
    for samples in (0, 99, 100, 200, 300, 301):
        calculator.update_num_microbatches(samples)
        sizes.append(calculator.get_current_global_batch_size())
    assert sizes == [8, 8, 16, 24, 32, 32]


@pytest.mark.parametrize("samples, iterations", [(7, 0), (8, 1), (100, 12), (112, 13), (300, 23), (400, 26), (431, 27)])
def test_steps_of_a_number_of_samples(samples, iterations):
    # 13 steps of 8 lead to 104, 6 of 16 to 200, 5 of 24 to 320, then 32 each
    sizes = calculator.make_num_microbatches_calculator([8, 8, 300], 32, 2, 2)
    assert calculator.iterations_of_samples(sizes, samples, 300) == iterations
    constant = calculator.make_num_microbatches_calculator(None, 32, 2, 2)
    assert calculator.iterations_of_samples(constant, samples) == samples // 32


def test_evaluation_sees_the_full_batch(batch_sizes):
    batch_sizes(1, [8, 8, 300], 32, 2, 2)
    with calculator.full_batch_size():
        assert (calculator.get_current_global_batch_size(), calculator.get_num_microbatches()) == (32, 8)
    assert (calculator.get_current_global_batch_size(), calculator.get_num_microbatches()) == (8, 2)


def test_batch_that_does_not_divide_names_the_nearest(batch_sizes):
    with pytest.raises(ValueError, match=r"global batch size 30 is not a multiple of .* = 8: use 24 or 32"):
        batch_sizes(1, None, 30, 2, 4)
    with pytest.raises(ValueError, match=r"rampup_batch_size is \[8, 5, 100\]"):
        batch_sizes(1, [8, 5, 100], 32, 2, 4)
    calculator.destroy_num_microbatches_calculator()
    with pytest.raises(RuntimeError, match="init_num_microbatches_calculator"):
        calculator.get_num_microbatches()
