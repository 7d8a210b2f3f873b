"""Every Ascend form binds to the installed operators' signatures and documented dtypes, shapes and layouts.

Forms that are composed of operators with a CPU kernel are compared with the CPU form too (`_same`); of a fused operator only
the shape and the dtype of the result are (`_fits`), since nothing here can compute its numbers.
"""

import importlib
import inspect
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindspeed_ms import ops
from mindspeed_ms.core import autograd, storage
from mindspeed_ms.ops import interface
from mindspeed_ms.ops.forms import DECLARED, FORM_NAMES
from tests.ascend.recorder import recording
from tests.ops import references
from tests.ops.harness import assert_close, tensor, values


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def _same(function, leaves=(), tolerance=3e-6, used=None):
    """Assert that both forms of `function()` agree, with gradients if `leaves` are given; the used operators are
    recorded.
    """
    with recording() as calls:
        ascend = _outputs_and_gradients(function, leaves)
    cpu = _outputs_and_gradients(function, leaves)
    for actual, expected in zip(ascend, cpu, strict=True):
        if isinstance(expected, Tensor):
            assert actual.dtype == expected.dtype, f"{actual.dtype} instead of {expected.dtype}"
            assert_close(values(actual), values(expected), tolerance, "ascend against cpu")
        else:
            assert actual == pytest.approx(expected, rel=1e-5)
    names = {path for path, _ in calls}
    assert used is None or used in names, f"{used} was not called; called: {sorted(names)}"
    return calls


def _fits(function, used=None):
    """Assert that the results of both forms have equal shapes and dtypes; returns the calls, `used` among them."""
    with recording() as calls:
        ascend = _outputs_and_gradients(function, ())
    cpu = _outputs_and_gradients(function, ())
    assert [(o.shape, o.dtype) for o in ascend] == [(o.shape, o.dtype) for o in cpu]
    names = {path for path, _ in calls}
    assert used is None or used in names, f"{used} was not called; called: {sorted(names)}"
    return calls


def _outputs_and_gradients(function, leaves):
    outputs = function()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs = [o for o in outputs if o is not None]
    if leaves:
        grads = [tensor(_normal(*o.shape, seed=9), "float32").astype(o.dtype) for o in outputs]
        outputs += autograd.grad(outputs, list(leaves), grads)
    return outputs


def _leaf(*shape, seed=0, dtype="float32"):
    return autograd.set_requires_grad(tensor(_normal(*shape, seed=seed), dtype))


def _products():
    x, w, b = _leaf(3, 2, 5), _leaf(4, 5, seed=1), _leaf(4, seed=2)
    _same(lambda: ops.linear(x, w, b), (x, w, b), used="mint.nn.functional.linear")
    dy = tensor(_normal(3, 2, 4))
    _same(
        lambda: (ops.linear_forward(x, w), ops.linear_input_grad(dy, w), ops.linear_weight_grad(dy, x), ops.bias_grad(dy)),
        used="mint.matmul",
    )
    # the CPU form takes the memory of its first argument
    _same(lambda: ops.add_linear(tensor(_normal(3, 2, 4)), x, w), used="mint.add")
    _same(lambda: ops.add_linear_input_grad(tensor(_normal(3, 2, 5)), dy, w), used="mint.add")
    _same(lambda: (ops.narrow_weight_grad(dy, x), ops.narrow_weight_grad(dy, x, True)), used="mint.matmul")
    _same(lambda: ops.scaled(dy, 0.5), used="mint.mul")

    def accumulated():
        main_grad = storage.FlatBuffer(20, "float32").slice(0, 20, (4, 5))
        ops.linear_weight_grad(dy, x, main_grad, overwrite=True)
        return ops.linear_weight_grad(dy, x, main_grad)

    _same(accumulated)
    for ta, tb in ((False, False), (True, False), (False, True), (True, True)):
        left = _leaf(2, *((4, 3) if ta else (3, 4)))
        right = _leaf(2, *((5, 4) if tb else (4, 5)), seed=1)
        _same(lambda a=left, b=right, ta=ta, tb=tb: ops.batch_matmul(a, b, ta, tb), (left, right), used="mint.matmul")


def _embedding():
    ids = Tensor(np.array([[3, 4, 9], [0, 6, 4]]), ms.int32)
    weight = tensor(_normal(4, 5))
    _same(lambda: ops.embedding_lookup(weight, ids, 3, 7, 10), used="mint.nn.functional.embedding")
    whole = tensor(_normal(10, 5))
    _same(lambda: ops.embedding_lookup(whole, ids), used="mint.nn.functional.embedding")
    with recording(), pytest.raises(ValueError, match="token id 9 is outside"):
        ops.embedding_lookup(weight, ids, 3, 7, 9)


def _norms_and_activations():
    for dtype in ("float32", "float16"):
        x, gamma, beta = tensor(_normal(3, 2, 8), dtype), tensor(_normal(8, seed=1)), tensor(_normal(8, seed=2))
        _fits(lambda x=x, g=gamma, b=beta: ops.layer_norm(x, g, b), "mint.nn.functional.layer_norm")
        _fits(lambda x=x, g=gamma: ops.rms_norm(x, g), "ops.rms_norm")
        _fits(lambda x=x, g=gamma: ops.add_rms_norm(x, g, x, g), "ops.rms_norm")
        _fits(lambda x=x, g=gamma: ops.npu_rms_norm(x, g), "ops.rms_norm")
        bias = tensor(_normal(8, seed=3), dtype)
        for name in ops.ACTIVATION_NAMES:
            _fits(lambda x=x, b=bias, n=name: ops.bias_activation(x, b, n))
    _fits(lambda: ops.swiglu(tensor(_normal(3, 8))), "ops.swiglu")
    composed = _same(lambda: ops.bias_activation(tensor(_normal(3, 8)), None, "swiglu", fused=False))
    assert "ops.swiglu" not in {path for path, _ in composed}
    leaf = _leaf(4, 6)
    for function in (ops.silu, ops.relu, ops.squared_relu):
        _same(lambda f=function: f(leaf), (leaf,), 1e-5)


def _rotary_and_layouts():
    t = _leaf(5, 2, 3, 8)
    for rot, angle_batch, interleaved in (
        (8, 1, False),
        (8, 2, False),
        (4, 1, False),
        (8, 1, True),
        (8, 2, True),
        (4, 2, True),
    ):
        cos, sin = tensor(_normal(5, angle_batch, 1, rot, seed=1)), tensor(_normal(5, angle_batch, 1, rot, seed=2))
        if not (interleaved and angle_batch > 1):
            _fits(lambda c=cos, s=sin, i=interleaved: ops.apply_rotary(t, c, s, i), "ops.rotary_position_embedding")
        composed = _same(lambda c=cos, s=sin, i=interleaved: ops.apply_rotary(t, c, s, i, fused=False), (t,))
        assert "ops.rotary_position_embedding" not in {path for path, _ in composed}
    for shape in ((1, 1, 3, 8), (1, 2, 1, 8), (5, 1, 1, 8), (5, 2, 1, 8)):
        cos, sin = tensor(_normal(*shape, seed=1)), tensor(_normal(*shape, seed=2))
        _fits(lambda c=cos, s=sin: ops.npu_rotary_position_embedding(t, c, s), "ops.rotary_position_embedding")
    mixed = _leaf(3, 2, 40)
    _same(lambda: ops.split_query_key_value(mixed, 2, 3, 4), (mixed,))
    tables = tensor(_normal(3, 1, 1, 4, seed=1)), tensor(_normal(3, 1, 1, 4, seed=2)), False
    _same(lambda: ops.split_query_key_value(mixed, 2, 3, 4, tables, fused=False), (mixed,))


def _attention():
    scores = _leaf(2, 3, 5, 7)
    mask = np.random.default_rng(3).random((2, 1, 5, 7)) < 0.3
    mask[1, 0, 2] = True
    hidden = Tensor(mask)
    _same(lambda: ops.scaled_masked_softmax(scores, hidden, 0.5), (scores,), 1e-5)
    _same(lambda: ops.scaled_masked_softmax(scores, None, 0.5, True, 3, 1), (scores,), 1e-5)
    q, k, v = _leaf(5, 2, 4, 8), _leaf(7, 2, 2, 8, seed=1), _leaf(7, 2, 2, 8, seed=2)
    keep = Tensor(np.random.default_rng(4).random((2, 4, 5, 7)) < 0.8)
    for options in (
        {},
        {"causal": True, "softmax_scale": 2.0, "scale": 0.3},
        {"mask": hidden, "pre_tokens": 3},
        {"dropout_p": 0.2, "dropout_mask": keep},
    ):
        _same(lambda o=options: ops.core_attention(q, k, v, **o), (q, k, v), 2e-5)
    sinks, wide = _leaf(4, seed=5), _leaf(7, 2, 2, 12, seed=2)
    for options in ({}, {"mask": hidden, "causal": True}):
        _same(lambda o=options: ops.core_attention(q, k, wide, sinks=sinks, **o), (q, k, wide, sinks), 2e-5)


def _cached_attention():
    steps = [([3, 0], [0, 0], [4, 2]), ([0, 3, 1], [2, 4, 0], [1, 1, 1]), ([0, 2], [3, 0], [4, 0]), ([0], [7], [1])]
    for window in (None, 3):
        caches = {form: [storage.zeros((5, 2, 12 if window is None else 6, 8), "float32") for _ in "kv"] for form in "ab"}
        forms = iter("ab" * len(steps))
        for slots, starts, lengths in steps:
            rows = [np.array(one, np.int32) for one in (slots, starts, lengths)]
            q, k, v = (tensor(_normal(max(lengths), len(slots), n, 8, seed=n + len(slots))) for n in (4, 2, 2))

            def both(q=q, k=k, v=v, rows=rows, window=window, caches=caches, forms=forms):
                context = ops.cached_attention(q, k, v, *caches[next(forms)], *rows, window=window)
                held = np.arange(max(rows[2]))[:, None] < rows[2]  # the output of padding means nothing
                return context * tensor(held[..., None])

            _same(both, tolerance=1e-5, used="mint.index_select")
        for a, b in zip(caches["a"], caches["b"], strict=True):
            assert np.array_equal(values(a), values(b))


def _cached_latents():
    """Values that begin their keys, and sinks."""
    held = {form: storage.zeros((2, 1, 4, 8), "float32") for form in "ab"}
    forms = iter("ab" * 2)
    for start, count in ((0, 3), (3, 1)):
        rows = [np.array([one], np.int32) for one in (1, start, count)]
        q, k = tensor(_normal(count, 1, 4, 8, seed=start)), tensor(_normal(count, 1, 1, 8, seed=start + 1))
        extra = {"sinks": tensor(_normal(4)), "value_width": 5, "scale": 0.3}
        _same(
            lambda q=q, k=k, rows=rows, extra=extra: ops.cached_attention(q, k, None, held[next(forms)], None, *rows, **extra),
            tolerance=1e-5,
        )


def _arguments_of(calls, operator="ops.flash_attention_score"):
    return [arguments for path, arguments in calls if path == operator][-1]


def _flash():
    q, k, v = (
        tensor(_normal(*shape, seed=seed), "float16")
        for seed, shape in enumerate(((8, 3, 4, 16), (24, 3, 2, 16), (24, 3, 2, 16)))
    )
    mask = Tensor(np.random.default_rng(3).random((3, 1, 8, 24)) < 0.3)
    cases = [{"input_layout": layout} for layout in ops.INPUT_LAYOUTS]
    cases += [
        {"mask": mask, "pre_tokens": 4, "next_tokens": 6},
        {"mask": mask[:1], "sparse_mode": 1},
        {"sparse_mode": 2},
        {"sparse_mode": 3},
        {"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 1},
    ]
    for options in cases:
        calls = _fits(lambda o=options: ops.flash_attention(q, k, v, **o), "ops.flash_attention_score")
        arguments = _arguments_of(calls)
        assert arguments["input_layout"] == options.get("input_layout", "SBH") and arguments["head_num"] == 4
        if "pre_tokens" in options and "mask" in options:  # the operator's own band leaves out whole blocks only
            expected = mask.asnumpy() | references.band(8, 24, -options["pre_tokens"], 99)
            assert np.array_equal(arguments["attn_mask"].asnumpy(), expected)
    with recording() as calls:
        dropped = ops.flash_attention(q, k, v, keep_prob=0.75, dropout_seed=5)
        assert dropped.shape == (8, 3, 64)
        assert _arguments_of(calls)["drop_mask"].shape == (3, 4, 8, 3)
        with pytest.raises(ValueError, match="float16 and bfloat16 only"):
            ops.flash_attention(tensor(values(q)), tensor(values(k)), tensor(values(v)))
        with pytest.raises(ValueError, match="head size of 8"):
            ops.flash_attention(q[..., :8], k[..., :8], v[..., :8])
    sunk = [tensor(values(one)) for one in (q, k, v)]
    for options in ({"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 1}, {"mask": mask, "pre_tokens": 4}):
        _same(lambda o=options: ops.flash_attention(*sunk, sinks=tensor(_normal(4)), **o), tolerance=1e-5)
    narrow = tensor(values(v)[..., :4], "float16")
    arguments = _arguments_of(_fits(lambda: ops.flash_attention(q, k, narrow, sparse_mode=3), "ops.flash_attention_score"))
    assert arguments["value"].shape == (24, 3, 32) and arguments["scalar_value"] == 0.25
    flat = q.reshape(8, 3, 64), k.reshape(24, 3, 32), v.reshape(24, 3, 32)
    _fits(lambda: ops.npu_fusion_attention(*flat, 4, "SBH", scale=0.25), "ops.operations.nn_ops.FlashAttentionScore")


def _partial_attention():
    places = np.arange(12, dtype=np.int32)
    first = np.stack([np.maximum(places - 4, 0), np.minimum(2 * places, 20)])
    stop = np.stack([places + 1, np.maximum(first[1], np.minimum(places + 3, 20))])
    stop[:, :2] = first[:, :2]  # the first queries see nothing
    mask = Tensor(np.random.default_rng(3).random((2, 1, 12, 20)) < 0.3)
    for dtype, blocked in (("float32", None), ("float32", mask), ("float16", None), ("float16", mask)):
        q, k, v = (tensor(_normal(*shape, seed=5), dtype) for shape in ((12, 2, 4, 16), (20, 2, 2, 16), (20, 2, 2, 16)))
        grad = tensor(_normal(12, 2, 4, 16, seed=6), dtype)

        def parts(q=q, k=k, v=v, grad=grad, blocked=blocked):
            nothing = np.zeros((1, 12), np.int32)
            result = ops.attention_with_statistics(q, k, v, nothing, nothing)
            result = ops.attention_with_statistics(q, k, v, nothing, nothing + 3, before=result)
            result = ops.attention_with_statistics(q, k, v, first, stop, blocked, before=result)
            before = ops.attention_with_statistics_gradient(grad, q, k, v, *result, nothing, nothing)
            return *result, *ops.attention_with_statistics_gradient(grad, q, k, v, *result, first, stop, blocked, before=before)

        if dtype == "float32":
            _same(parts, used="mint.matmul")
        else:
            calls = _fits(parts, "ops.auto_generate.FlashAttentionScoreGrad")
            assert "ops.operations.nn_ops.FlashAttentionScore" in {path for path, _ in calls}


def _losses():
    logits, target, grad = (
        tensor(_normal(3, 2, 7)),
        Tensor(np.array([[3, 9], [4, 5], [0, 8]]), ms.int32),
        tensor(_normal(3, 2)),
    )
    maximum = ops.cross_entropy_local_max(logits)
    _same(lambda: ops.cross_entropy_local_max(logits), used="mint.max")
    total = tensor(np.full((3, 2), 5.0))
    for smoothing in (0.0, 0.1):
        _same(lambda a=smoothing: ops.cross_entropy_loss(total, grad, maximum, a, 20), used="mint.log")
        _same(lambda a=smoothing: ops.cross_entropy_local_sums(logits, maximum, target, 3, 10, a), used="mint.gather")
        _same(
            lambda a=smoothing: ops.cross_entropy_gradient(logits, maximum, total, target, 3, 10, grad, a, 20),
            used="mint.scatter_add",
        )


def _dropouts():
    keep = Tensor(np.random.default_rng(5).random((3, 2, 8)) < 0.7)
    x, bias, residual = _leaf(3, 2, 8), _leaf(8, seed=1), _leaf(3, 2, 8, seed=2)
    _same(lambda: ops.dropout(x, 0.3, keep), (x,))
    _same(lambda: ops.bias_dropout_add(x, bias, residual, 0.3, keep), (x, bias, residual))
    _same(lambda: ops.residual_add(x, residual), (x, residual))


def _optimizers():
    def adamw():
        states = [storage.FlatBuffer(40, "float32").slice(0, 40, (5, 8)) for _ in range(3)]
        storage.write(states[0], tensor(_normal(40)))
        for step in (1, 2):
            ops.adamw_step(
                *states,
                tensor(_normal(5, 8, seed=step)),
                learning_rate=0.01,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                weight_decay=0.1,
                step=step,
                grad_scale=0.5,
            )
        return tuple(states)

    def sgd():
        states = [storage.FlatBuffer(40, "float32").tensor for _ in range(2)]
        for step in (1, 2):
            ops.sgd_step(
                *states, tensor(_normal(40, seed=step)), learning_rate=0.1, momentum=0.9, weight_decay=0.1, first_step=step == 1
            )
        return tuple(states)

    def flat():
        buffer = storage.FlatBuffer(6, "float32").tensor
        ops.add_into(buffer, tensor([0.0, 1.0, 2.0, 0.0, -3.0, 4.0]))
        ops.scale_in_place(buffer, 0.5)
        return buffer, ops.sum_of_squares(buffer), ops.count_zeros(buffer)

    for function in (adamw, sgd, flat):
        _same(function)


def _experts():
    counts = (3, 0, 4)
    dy = tensor(_normal(7, 6, seed=2))
    x, w = _leaf(7, 5), _leaf(3, 5, 6, seed=1)
    _fits(lambda: ops.grouped_linear(x, w, counts), "ops.auto_generate.grouped_matmul_v4")
    calls = _fits(lambda: (ops.grouped_linear_forward(x, w, counts), ops.grouped_linear_input_grad(dy, w, counts)))
    shapes = [tuple(arguments["weight"][0].shape) for path, arguments in calls if path.endswith("grouped_matmul_v4")]
    assert shapes == [(3, 5, 6), (3, 6, 5)]
    _same(lambda: ops.grouped_linear_weight_grad(dy, x, counts), used="mint.matmul")
    _same(lambda: ops.grouped_linear_weight_grad(dy[:0], x[:0], (0, 0, 0)))
    _same(lambda: ops.grouped_linear_forward(x[:0], w, (0, 0, 0)))

    def accumulated(dtype, times):
        main_grad = storage.FlatBuffer(90, "float32").slice(0, 90, (3, 5, 6))
        rows = tensor(_normal(7, 6, seed=2), dtype), tensor(_normal(7, 5), dtype)
        for time in range(times):
            ops.grouped_linear_weight_grad(*rows, counts, main_grad, overwrite=time == 0)
        return main_grad

    _same(lambda: accumulated("float32", 2))
    _fits(lambda: accumulated("float16", 2), "ops.auto_generate.grouped_matmul_add_")
    order = Tensor(np.array([2, 0, 2, 3, 0, 2, 5]), ms.int32)
    _same(lambda: ops.permute(x, order), (x,), used="mint.index_select")
    probs, map_ = _leaf(7, seed=3), Tensor(np.random.default_rng(3).random((9, 4)) < 0.4)
    _same(lambda: ops.unpermute(x, order, 6), (x,), used="mint.index_add")
    _same(lambda: ops.unpermute(x, order, 6, probs), (x, probs))
    _same(lambda: ops.expert_order(map_)[0], used="mint.nonzero")
    with recording():
        rows, ascend_counts = ops.expert_order(map_)
    assert np.array_equal(ascend_counts, map_.asnumpy().sum(0)) and ascend_counts.dtype == np.int64
    chances, scores = _leaf(9, 4, seed=4), _leaf(2, 3, 6, seed=5)
    _same(lambda: ops.permute_probs(chances, rows, ascend_counts), (chances,))
    _same(lambda: ops.top_k(scores, 2)[0], (scores,), used="mint.topk")
    indices = ops.top_k(scores, 2)[1]
    _same(lambda: ops.top_k(scores, 2)[1])
    _same(lambda: ops.gather_columns(scores, indices), (scores,), used="mint.gather")
    chosen = _leaf(2, 3, 2, seed=6)
    _same(lambda: ops.scatter_columns(chosen, indices, 6), (chosen,), used="mint.scatter")
    for function, name in ((ops.softmax, "nn.functional.softmax"), (ops.sigmoid, "sigmoid"), (ops.log_sum_exp, "logsumexp")):
        _same(lambda f=function: f(scores), (scores,), 1e-5, used=f"mint.{name}")


CASES = (
    _experts,
    _products,
    _embedding,
    _norms_and_activations,
    _rotary_and_layouts,
    _attention,
    _cached_attention,
    _cached_latents,
    _flash,
    _partial_attention,
    _losses,
    _dropouts,
    _optimizers,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_form_calls_what_is_documented(world, case):
    world(1)(case)


@pytest.mark.parametrize("form", FORM_NAMES)
def test_every_operator_has_its_form_and_every_form_is_declared(form):
    found = {}
    for topic in {path.stem for path in Path(interface.__file__).parent.glob("[!_]*.py")}:
        module = importlib.import_module(f"mindspeed_ms.ops.{form}.{topic}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                found[name] = inspect.signature(function)
    assert found == {name: inspect.signature(declaration) for name, declaration in DECLARED.items()}
