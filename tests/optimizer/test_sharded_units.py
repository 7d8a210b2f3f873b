"""Models that are not a plain chain of layers under ZeRO: parameters shared, left out, or used outside their layer."""

import operator
from functools import partial

import numpy as np
import pytest

from mindspeed_ms.core.comm.errors import MismatchError
from mindspeed_ms.core.released_parameter import ReleasedParameterError
from mindspeed_ms.testing import small_trainings as job
from mindspeed_ms.testing.parity.runner import local_batch, micro_batches, start

ALL_USED = [[1] * job.GLOBAL_BATCH] * 3


def make_model(kind):
    """Three small layers with two weights each; the second is used only if the micro-batch's first token is odd.

    Kinds: "plain"; "shared": the last layer has the first one's second weight; "outside": the loss uses a layer's weight;
    "owned": a cell outside the layers owns that weight too.
    """
    import mindspore as ms
    from mindspore import Parameter, Tensor, mint, nn, ops

    random = np.random.RandomState(5)

    def weight(rows, scale, name):
        return Parameter(Tensor((random.randn(rows, 8) * scale).astype(np.float32)), name=name)

    class Layer(nn.Cell):
        def __init__(self, index, second=None):
            super().__init__()
            self.first = weight(8, 0.3, f"layer{index}.first")
            self.second = second if second is not None else weight(8, 0.3, f"layer{index}.second")

        def construct(self, x, uses_second):
            x = x + mint.matmul(mint.tanh(x), self.first)
            return x + mint.matmul(mint.tanh(x), self.second) if uses_second else x

    class Model(nn.Cell):
        def __init__(self):
            super().__init__()
            self.embedding = weight(64, 1.0, "embedding")
            start_layer = Layer(0)
            self.layers = nn.CellList([start_layer, Layer(1), Layer(2, start_layer.second if kind == "shared" else None)])
            self.head = weight(64, 0.3, "head")
            if kind == "owned":
                self.again = start_layer.first

        def construct(self, tokens, labels, loss_mask, position_ids=None, attention_mask=None):
            uses_second = bool(tokens.asnumpy()[0, 0] % 2)
            x = ops.gather(self.embedding, tokens, 0)
            for layer in self.layers:
                x = layer(x, uses_second)
            logits = mint.matmul(x, mint.transpose(self.head, 0, 1))
            own = ops.gather_elements(logits, 2, labels.astype(ms.int32).expand_dims(2)).squeeze(2)
            losses = mint.log(mint.sum(mint.exp(logits), 2)) - own
            loss = mint.sum(losses * loss_mask) / mint.sum(loss_mask)
            if kind in ("outside", "owned"):
                loss = loss + 0.01 * mint.sum(self.layers[0].first * self.layers[0].first)
            return loss

    return Model()


def train(kind, first_tokens, level=None, zero_config=None, bucket_size=None):
    """Train; losses, norms and final weights. `first_tokens` [step][row] decide what is used."""
    from mindspeed_ms.config import fit_to_world
    from mindspeed_ms.core import comm
    from mindspeed_ms.training.checkpointing import whole_parameters
    from mindspeed_ms.training.forward_step import forward_step
    from mindspeed_ms.training.model_setup import get_model, get_optimizer, get_optimizer_param_scheduler
    from mindspeed_ms.training.train_step import TrainOneStep

    config = job.make_config(
        job.UNTIED,
        {"zero_level": level} if level else {},
        training={"bucket_size": bucket_size} if bucket_size else {},
        optimizer={"zero_config": zero_config} if zero_config else {},
    )
    fit_to_world(config, comm.get_world_size())
    start(config, 7)
    model = get_model(lambda pre_process=True, post_process=True: make_model(kind), config)
    optimizer = get_optimizer(config, model)
    step = TrainOneStep(model, optimizer, get_optimizer_param_scheduler(optimizer, config, 4), forward_step)
    data = job.batches(len(first_tokens))
    data["tokens"][:, :, 0] = first_tokens
    reports = [step(micro_batches(local_batch(data, number, 1), 1), number + 1)[0] for number in range(len(first_tokens))]
    with whole_parameters(model):
        weights = {name: param.asnumpy().copy() for name, param in model[0].module.parameters_and_names()}
    return [report.loss for report in reports], [report.grad_norm for report in reports], weights


def assert_equal_to_one_rank(world, kind, first_tokens, *options):
    loss, norm, weights = world(1)(train, kind, first_tokens)[0]
    for found in world(2)(train, kind, first_tokens, *options):
        np.testing.assert_allclose(found[0], loss, rtol=1e-5)
        np.testing.assert_allclose(found[1], norm, rtol=1e-5)
        for name, array in weights.items():
            assert np.linalg.norm(found[2][name] - array) < 1e-5 * np.linalg.norm(array), name


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("bucket_size", [None, 60])
@pytest.mark.parametrize("level", ["z2", "z3"])
def test_parameters_that_a_micro_batch_leaves_out(world, level, bucket_size, once):
    """Rows are dealt [micro-batch, rank]: the ranks leave out the same."""
    first_tokens = [[0, 0, 1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]]
    assert_equal_to_one_rank(world, "plain", first_tokens, level, {"allreduce_after_grad_accumulation": once}, bucket_size)


@pytest.mark.parametrize("kind", ["shared", "owned"])
def test_parameters_of_several_cells(world, kind):
    assert_equal_to_one_rank(world, kind, ALL_USED, "z3")


def test_use_outside_the_layer_names_the_parameter(world):
    with pytest.raises(ReleasedParameterError, match=r"parameter 'layers\.0\.first' was used where it is not held"):
        world(2)(train, "outside", ALL_USED, "z3")


def names_of_units(unit_modules):
    """Names of the units; a class is given by the number of a layer that has it."""
    from mindspore import nn

    from mindspeed_ms.core.distributed.sharded_units import find_units

    model = make_model("plain")
    model.layers.append(nn.Identity())  # nothing to gather: no unit
    if isinstance(unit_modules, int):
        unit_modules = (type(model.layers[unit_modules]),)
    names = {id(cell): name for name, cell in model.cells_and_names()}
    return [names[id(cell)] for cell in find_units(model, unit_modules)]


LAYERS = ["layers.0", "layers.1", "layers.2"]
UNITS = [(None, LAYERS), (("layers.[02]",), ["layers.0", "layers.2"]), (("layers*",), ["layers"]), (0, LAYERS)]


@pytest.mark.parametrize("unit_modules, expected", UNITS, ids=["lists", "names", "outermost", "class"])
def test_units_are_chosen_by_name_or_class(world, unit_modules, expected):
    assert world(1)(names_of_units, unit_modules) == [expected]


def test_unit_modules_that_match_nothing_are_an_error(world):
    with pytest.raises(
        ValueError, match=r"unit_modules is \('blocks.\*',\), but no cell of Model .* names like layers, layers.0"
    ):
        world(1)(names_of_units, ("blocks.*",))


def bytes_in_full():
    """Bytes of z3's parameters that exist in full before, inside and after `whole_parameters`, also after an error inside."""
    from mindspeed_ms.training.model_setup import get_model

    config = job.make_config(job.UNTIED, {"zero_level": "z3"})
    start(config, 7)
    (chunk,) = get_model(lambda pre_process=True, post_process=True: make_model("plain"), config)
    counts = [chunk.whole_nbytes]
    for error in (None, KeyError):
        try:
            with chunk.whole_parameters(changes=True):
                counts.append(chunk.whole_nbytes)
                if error:
                    raise error
        except KeyError:
            pass
        counts.append(chunk.whole_nbytes)
    return counts


def test_whole_parameters_exist_inside_only(world):
    whole = 4 * (2 * 64 * 8 + 6 * 8 * 8)
    assert world(2)(bytes_in_full) == [[0, whole, 0, whole, 0]] * 2


REFLECTED = ("add", "floordiv", "matmul", "mod", "mul", "pow", "sub", "truediv")


def uses_of_released():
    """Names of the uses of a released parameter that did not raise, and the value it has when it is held again."""
    import mindspore as ms
    from mindspore import Parameter, Tensor, mint, ops

    from mindspeed_ms.core import storage
    from mindspeed_ms.core.released_parameter import mark_released

    x = Tensor(np.ones((4, 4), np.float32))
    param = Parameter(x, name="w")
    kind = type(param)
    storage.release(param)
    uses = {
        "x * w": lambda: x * param,
        "w * w": lambda: param * param,
        "x @ w": lambda: x @ param,
        "T": lambda: param.T,
        "sum": lambda: mint.sum(param),
        "reduce": lambda: ops.reduce_sum(param),
        "cast": lambda: param.astype(ms.float16),
        "view": lambda: param.view(-1),
        "concat": lambda: ops.cat([x.view(-1), param]),
        "copy": param.copy,
        "linear": lambda: mint.nn.functional.linear(x, param),
        "asnumpy": param.asnumpy,
        "data": lambda: param.data,
        "array": lambda: storage.read_array(param),
        "write": lambda: storage.zero(param),
        "clone": param.clone,
        **{f"2 {name} w": partial(getattr(operator, name), 2.0, param) for name in REFLECTED},
    }
    silent = []
    for name, use in uses.items():
        try:
            use()
            silent.append(name)
        except ReleasedParameterError as error:
            assert "'w'" in str(error)
    text = repr(param)
    mark_released(param)  # again: it is still one mark
    storage.set_data(param, x)
    assert type(param) is kind
    return silent, text, float(mint.sum(param * param).asnumpy())


def test_released_parameters_refuse_every_use(world):
    silent, text, total = world(1)(uses_of_released)[0]
    assert silent == [] and "released" in text and total == 16


def mismatch(level):
    try:
        train("plain", [[0, 1] * 4], level, None, 60)
    except MismatchError as error:
        return str(error)


def test_ranks_that_use_different_parameters(world):
    """The error says which parameters the call was for and what may be the reason."""
    texts = [text for text in world(2)(mismatch, "z2") if text]
    assert any(
        "reduced the gradients of bucket" in text and "layers." in text and "used different parameters" in text
        for text in texts
    ), texts
