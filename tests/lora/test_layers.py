"""Linears with adapters: public constructors, scale, dropout, what they keep, LoRA+."""

from unittest import mock

import numpy as np
import pytest

from mindspeed_ms.layout.adapters import Adapter
from tests.lora.test_layouts import LORA, TARGETS
from tests.model import builders


def layers():
    from mindspore import Tensor

    from mindspeed_ms.core import autograd, storage
    from mindspeed_ms.core.rng import get_rng_tracker
    from mindspeed_ms.core.tensor_parallel import ColumnParallelLoRA, RowParallelLoRA
    from mindspeed_ms.core.tensor_parallel.lora import LinearWithLowRank

    config = builders.make_config(builders.LLAMA)
    builders.start(config)
    x = Tensor(np.random.RandomState(0).rand(5, 2, 8).astype(np.float32))
    common = {"config": config, "init_method": "normal", "bias": False, "lora_rank": 4, "lora_alpha": 12}
    column = ColumnParallelLoRA(8, 6, **common)
    row = RowParallelLoRA(8, 6, **common, input_is_parallel=True, lora_dropout=0.5)
    for cell in (column, row):
        storage.write(cell.lora_b, Tensor(np.random.RandomState(1).rand(6, 4).astype(np.float32)))
        w, a, b = (values.asnumpy() for values in (cell.weight, cell.lora_a, cell.lora_b))
        expected = x.asnumpy() @ (w + 3.0 * b @ a).T
        cell.set_train(False)
        np.testing.assert_allclose(cell(x)[0].asnumpy(), expected, atol=1e-5)
        cell.is_active = False
        np.testing.assert_allclose(cell(x)[0].asnumpy(), x.asnumpy() @ w.T, atol=1e-5)
        cell.is_active = True
    row.set_train()
    first, second = (row(x)[0].asnumpy() for _ in range(2))
    assert (first != second).any()
    column.weight.requires_grad = False
    saved = []
    with autograd.saved_tensors_hooks(lambda tensor: saved.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor):
        column(autograd.set_requires_grad(autograd.detach(x)))
    row.weight.requires_grad = True
    row.set_train(False)
    leaf, total = autograd.set_requires_grad(autograd.detach(x)), np.ones((5, 2, 6), np.float32)
    found = autograd.grad(row(leaf)[0], (leaf, row.weight, row.lora_a, row.lora_b), Tensor(total))
    flat, g = x.asnumpy().reshape(10, 8), total.reshape(10, 6)
    expected = (g @ (w + 3.0 * b @ a), g.T @ flat, 3.0 * (g @ b).T @ flat, 3.0 * g.T @ (flat @ a.T))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.asnumpy().reshape(other.shape), other, atol=1e-4)
    kept = get_rng_tracker().current.keep_mask((5, 2, 8), 0.5)
    with mock.patch.object(type(row), "_dropout_of", lambda *_: (0.5, kept)):
        found = autograd.grad(row(leaf)[0], (leaf, row.weight, row.lora_a, row.lora_b), Tensor(total))
    kept = kept.asnumpy().reshape(10, 8) * 2.0
    own, low = 3.0 * (g @ b @ a) * kept, 3.0 * (g @ b).T @ (flat * kept)
    for one, other in zip(found, (g @ w + own, g.T @ flat, low, 3.0 * g.T @ ((flat * kept) @ a.T)), strict=True):
        np.testing.assert_allclose(one.asnumpy().reshape(other.shape), other, atol=1e-4)
    with pytest.raises(ValueError, match="no expert's"):
        ColumnParallelLoRA(8, 6, **common, is_expert=True)
    assert issubclass(LinearWithLowRank, autograd.Function)
    return saved


def test_constructors_scale_dropout_and_what_a_frozen_weight_keeps(world):
    """A keeps the input of the linear, B the low-rank activations; the frozen weight keeps nothing."""
    assert sorted(world(1)(layers)[0]) == [(5, 2, 4), (5, 2, 8)]


def dropped(sequence_parallel):
    """What dropout keeps of the inputs of a column- and a row-parallel adapter."""
    from mindspeed_ms.core.tensor_parallel import ColumnParallelLoRA, RowParallelLoRA

    config = builders.make_config(builders.LLAMA, tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    builders.start(config)
    common = {"config": config, "init_method": "zeros", "bias": False, "lora_dropout": 0.5}
    cells = ColumnParallelLoRA(8, 6, **common), RowParallelLoRA(8, 6, **common, input_is_parallel=True)
    masks = []
    for cell in cells:
        cell.set_train()
        masks.append(cell._dropout_of(np.zeros((8, 8)))[1].asnumpy())
    return masks


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_drop_the_same_of_the_same_input(world, sequence_parallel):
    """And different elements of the parts that each has of a cut one."""
    (column, row), (other_column, other_row) = world(2)(dropped, sequence_parallel)
    assert (column == other_column).all() != sequence_parallel and (row != other_row).any()


def picked(masks):
    """Of each mask what `counted_tokens` gives as samples and as a sequence, of views as arguments; True: just these."""
    from mindspore import Tensor

    from mindspeed_ms.legacy.model.counted_tokens import counted_tokens

    hidden = Tensor(np.arange(12, dtype=np.float32).reshape(3, 2, 2))
    labels = Tensor(np.array([[0, 10], [1, 11], [2, 12]], np.int32)).T
    results = []
    for mask in masks:
        arguments = hidden, labels, Tensor(np.ascontiguousarray(np.transpose(mask), np.float32)).T
        for as_sequence in (False, True):
            found = counted_tokens(*arguments, as_sequence)
            same = all(one is other for one, other in zip(found, arguments, strict=True))
            results.append(same or [one.asnumpy().tolist() for one in found])
    return results


def test_tokens_that_are_counted(world):
    """With the weights of the mask; of none the first, and of all the arguments."""
    (found,) = world(1)(picked, [[[0, 0.5, 0], [2, 0, 1]], np.zeros((2, 3)), np.ones((2, 3)), [[1] * 3, [1, 1, 0]]])
    rows = [[2, 3], [4, 5], [10, 11]]
    assert found[0] == [[rows], [[10], [1], [12]], [[2], [0.5], [1]]]
    assert found[1] == [[[row] for row in rows], [[10, 1, 12]], [[2, 0.5, 1]]]
    assert found[2:6] == [[[[[0, 1]]], [[0]], [[0]]]] * 2 + [True, True]
    assert [len(one[2][0]) * len(one[2]) for one in found[6:]] == [5, 5]


def losses_of_counted_tokens(**model):
    from mindspore import Tensor

    from mindspeed_ms import ops
    from mindspeed_ms.core import autograd
    from mindspeed_ms.testing import small_trainings

    cell = small_trainings.build(small_trainings.make_config({**small_trainings.UNTIED, **model}, lora=LORA))[0][0].module
    for name, parameter in cell.parameters_and_names():
        if name.endswith("lora_b"):
            parameter.set_data(Tensor(np.random.RandomState(len(name)).rand(*parameter.shape).astype(np.float32) / 9))
    trained = [parameter for _, parameter in cell.parameters_and_names() if autograd.requires_grad(parameter)]
    assert cell._counts_tokens
    random, rows, results = np.random.RandomState(0), [], []
    ids = Tensor(random.randint(0, 64, (2, 17)).astype(np.int32))
    sums = ops.cross_entropy_local_sums

    def counted(logits, *arguments):
        rows.append(logits.shape[0] * logits.shape[1])
        return sums(logits, *arguments)

    some = (random.rand(2, 16) < 0.4).astype(np.float32) * 0.5
    for mask in (some, np.zeros_like(some), np.ones_like(some)):
        for cell._counts_tokens in (True, False):
            ops.cross_entropy_local_sums = counted
            try:
                loss = cell(ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous(), loss_mask=Tensor(mask))
            finally:
                ops.cross_entropy_local_sums = sums
            results.append((float(loss.asnumpy()), [grad.asnumpy() for grad in autograd.grad(loss, trained)]))
    return results, rows, np.count_nonzero(some)


@pytest.mark.parametrize("model", [{}, {"loss_chunk_size": 4}], ids=["whole", "chunks"])
def test_head_computes_the_tokens_that_the_loss_counts(world, model):
    results, rows, count = world(1)(losses_of_counted_tokens, **model)[0]
    if model:
        assert max(rows) == 4 and sum(rows) == count + 32 + 1 + 32 + 32 + 32
    else:
        assert rows == [count, 32, 1, 32, 32, 32]
    for (loss, grads), (expected, wanted) in zip(results[::2], results[1::2], strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        for grad, other in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(grad, other, atol=1e-6)
    assert results[0][0] > 0 and results[2][0] == 0.0 and not any(grad.any() for grad in results[2][1])


def test_scale():
    assert Adapter("lora", (), 4, 32).scale == 8.0
    assert Adapter("lora", (), 4, 32, is_rank_stabilized=True).scale == 16.0


def rates(**lora):
    from mindspeed_ms.testing import small_trainings

    config = small_trainings.make_config(small_trainings.UNTIED, lora={**LORA, **lora})
    _, optimizer, _ = small_trainings.build(config)
    return {name.rpartition(".")[2]: group["lr"] for group in optimizer.param_groups for name in group["names"]}


def test_lora_plus_scales_the_rate_of_b(world):
    assert world(1)(rates, lora_plus_ratio=16.0)[0] == pytest.approx({"lora_a": 0.01, "lora_b": 0.16})
    assert world(1)(rates)[0] == pytest.approx({"lora_a": 0.01, "lora_b": 0.01})


def special():
    from mindspeed_ms.testing import small_trainings

    name = "language_model.encoder.layers.1.attention.qkv_proj"
    cells = [*TARGETS, {"cell": name, "rank": 2, "alpha": 1}]
    config = small_trainings.make_config(small_trainings.UNTIED, lora={**LORA, "target_cells": cells})
    model = small_trainings.build(config)[0][0].module
    layers = model.language_model.encoder.layers
    return [(layer.attention.qkv_proj.lora_a.shape[0], layer.attention.qkv_proj.scale) for layer in layers]


def test_a_cell_may_have_settings_of_its_own(world):
    assert world(1)(special)[0] == [(3, 2.0), (2, 0.5), (3, 2.0), (3, 2.0)]
