"""The hccl backend against a recording stand-in: every call binds to the installed operator's signature and gets the
right tensors. The stand-in plays two ranks that hold the same values. The backend was not run on hardware here."""

import inspect

import numpy as np

from mindspeed_ms.core.comm import P2P

SUPPORTED = {"Float32", "Float16", "BFloat16", "Int32", "Int64", "UInt8", "Int8"}


class Recorder:
    """Stands in for `mindspore.mint.distributed`."""

    def __init__(self, module):
        self._module = module
        self.P2POp = module.P2POp
        self.calls = []

    def __getattr__(self, name):
        operator = getattr(self._module, name)

        def record(*arguments, **keywords):
            bound = inspect.signature(operator).bind(*arguments, **keywords)
            bound.apply_defaults()
            values = dict(bound.arguments)
            for value in values.values():
                if hasattr(value, "is_contiguous"):
                    assert value.is_contiguous() and str(value.dtype) in SUPPORTED, (name, value.dtype)
            assert values.get("group", "") in ("", "hccl-group") or name == "init_process_group"
            self.calls.append((name, {key: value for key, value in values.items() if key in ("op", "async_op", "src", "dst")}))
            return self._play(name, values)

        return record

    def _play(self, name, values):
        from mindspeed_ms.core.storage import as_array

        if name == "all_reduce" and values["op"] == "sum":
            as_array(values["tensor"])[...] *= 2
        elif name == "all_gather_into_tensor":
            array = values["input_tensor"].asnumpy()
            as_array(values["output_tensor"])[...] = np.concatenate([array, array])
        elif name == "reduce_scatter_tensor":
            array = values["input"].asnumpy()
            as_array(values["output"])[...] = 2 * array[: len(array) // 2]
        elif name == "all_to_all_single":
            first = values["input"].asnumpy()[: values["input_split_sizes"][0]]
            as_array(values["output"])[...] = np.concatenate([first, first])
        elif name == "irecv":
            as_array(values["tensor"]).fill(7)
        elif name == "batch_isend_irecv":
            for request in values["p2p_op_list"]:
                if request.op == "irecv":
                    as_array(request.tensor).fill(7)
            return [self]
        elif name == "all_gather_object":
            values["object_list"][:] = [values["obj"]] * 2
        return self

    def wait(self):
        """As a handle of the operators."""


def _run_all():
    import mindspore as ms
    from mindspore import Tensor

    from mindspeed_ms.core.comm import hccl

    hccl.distributed = recorder = Recorder(hccl.distributed)
    try:
        group = hccl.HcclGroup("tp-0-1", (0, 1), 0, "hccl-group")
        values = Tensor(np.arange(8, dtype=np.float32).reshape(4, 2))
        flags = Tensor(np.array([True, False]))
        whole = Tensor(np.zeros((8, 2), np.float32))
        results = [
            group.all_reduce(values),
            group.all_reduce(values, async_op=True).wait(),
            group.all_reduce(flags, "prod"),
            group.all_gather(values.T),
            group.all_gather_into(whole, values),
            group.reduce_scatter(values),
            group.reduce_scatter(values.astype(ms.float16), "sum", async_op=True).wait(),
            group.all_to_all(values, [3, 3], [3, 1]),
            group.broadcast(values, 1),
            group.all_gather(flags),
            group.recv((2,), "bool", 1),
            group.irecv((3,), ms.int32, 1).wait(),
            group.isend(values, 1).wait(),
            group.batch_isend_irecv([P2P.send(values, 1), P2P.recv((2,), "float32", 1)]).wait(),
            group.all_gather_object("x"),
            group.broadcast_object("y", 0),
            group.barrier(),
            group.all_reduce(np.ones(2, np.float32)),
            group.all_reduce(Tensor(np.zeros((0, 3), np.float32))),
        ]
        return results, values, recorder.calls
    finally:
        hccl.distributed = recorder._module


def test_every_form_binds_to_the_operators(world):
    ((results, values, made),) = world(1)(_run_all)
    base = np.arange(8, dtype=np.float32).reshape(4, 2)
    np.testing.assert_array_equal(values, base)  # arguments are untouched
    np.testing.assert_array_equal(results[0], 2 * base)
    np.testing.assert_array_equal(results[1], 2 * base)
    assert results[2].dtype == bool and results[2].tolist() == [True, False]
    np.testing.assert_array_equal(results[3], np.concatenate([base.T, base.T]))
    np.testing.assert_array_equal(results[4], np.concatenate([base, base]))
    np.testing.assert_array_equal(results[5], 2 * base[:2])
    assert results[6].dtype == np.float16
    assert results[7].shape == (6, 2)
    np.testing.assert_array_equal(results[8], base)
    assert results[9].tolist() == [True, False] * 2
    assert results[10].dtype == bool and results[11].tolist() == [7, 7, 7]
    assert results[13][0] is None and results[13][1].tolist() == [7, 7]
    assert results[14:16] == [["x", "x"], "y"]
    assert results[17].tolist() == [2, 2] and results[18].shape == (0, 3)
    assert ("all_reduce", {"op": "min", "async_op": False}) in made  # bool: and
    assert [name for name, _ in made].count("all_reduce") == 4  # nothing is sent for no elements
    assert ("all_reduce", {"op": "sum", "async_op": True}) in made
