"""torch's side of `test_torch_files`: `write FOLDER` saves files of many kinds and describes them, `check FOLDER` ours."""

import argparse
import collections
import io
import json
import pathlib
import sys

import numpy as np
import torch
import torch.distributed.checkpoint

DTYPES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool".split()


def described(value, place, found):
    """Tensors below an object: {place: [dtype, shape, values as hexadecimal bytes]}."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        found[place] = [str(value.dtype).removeprefix("torch."), list(value.shape), data.hex()]
    elif isinstance(value, dict):
        for key, item in value.items():
            described(item, f"{place}.{key}" if place else str(key), found)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            described(item, f"{place}.{number}", found)
    return found


def values(dtype, *shape):
    """Tensor of random bits."""
    dtype, numel = getattr(torch, dtype), int(np.prod(shape))
    if dtype == torch.bool:
        return torch.arange(numel).remainder(3).bool().reshape(shape)
    bits = np.random.RandomState(numel).randint(0, 256, numel * dtype.itemsize, np.uint8)
    return torch.frombuffer(bytearray(bits), dtype=dtype).clone().reshape(shape)


def plain():
    """Objects that torch.load(weights_only=True) takes too."""
    torch.manual_seed(1)
    base = values("bfloat16", 6, 8)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return {
        "dtypes": {name: values(name, 3, 5) for name in DTYPES},
        "views": [
            base,
            base.t(),
            base[1:4, ::3],
            base[2],
            base[3, 4],
            base[:0],
            base[0, :1].expand(3, 4),
            base.reshape(2, 3, 2, 4),
        ],
        "empty": [torch.zeros(0, 3), torch.zeros(3, 0), torch.zeros(())],
        "parameter": torch.nn.Parameter(values("float32", 2, 2)),
        "frozen": torch.nn.Parameter(values("float32", 2), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "bytes": b"\0\xff",
        "numbers": [0, -1, 255, 256, 1 << 31, -(1 << 63), 1 << 200, 0.1, float("inf"), None, True, 2j],
        "text": "é\n",
        "ordered": collections.OrderedDict(a=1),
        "set": {1, 2},
    }


def rich():
    """Objects that only a full unpickler takes."""
    master = torch.ones(3)
    master.tensor_model_parallel, master.partition_dim = True, 1
    default = collections.defaultdict(dict)
    default["a"] = {1: torch.ones(1)}
    return {
        "args": argparse.Namespace(
            params_dtype=torch.float32, lr=0.1, path=pathlib.PosixPath("/a/b"), device=torch.device("cuda", 1)
        ),
        "master": master,
        "stream": io.BytesIO(b"abc"),
        "array": np.arange(6, dtype=">f4").reshape(2, 3).T,
        "scalar": np.float64(0.5),
        "default": default,
        "counter": collections.Counter("aab"),
        "layout": torch.strided,
        "bytearray": bytearray(b"xy"),
        "slice": slice(1, None, 2),
        "frozenset": frozenset([1]),
    }


def write(folder):
    """Save the files, and expected.json with the tensors of each."""
    everything = {**plain(), **rich()}
    torch.save(plain(), folder / "plain.pt")
    torch.save(everything, folder / "zip.pt")
    torch.save(everything, folder / "zip5.pt", pickle_protocol=5)
    expected = {name: described(everything, "", {}) for name in ("other name.bin", "zip5.pt")}
    (folder / "zip.pt").rename(folder / "other name.bin")
    for name in ("uint16", "uint32", "uint64"):  # torch itself cannot load those from the old format
        everything["dtypes"].pop(name)
    torch.save(everything, folder / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(values("float32", 3), folder / "one.pt", _use_new_zipfile_serialization=False)
    state = {"w": values("bfloat16", 5, 3), "empty": torch.zeros(0, 2), "numbers": [1, 2]}
    torch.distributed.checkpoint.save(state, checkpoint_id=folder / "distributed", no_dist=True)
    torch.save({"a": {"w": torch.ones(2).to(torch.float8_e4m3fn)}}, folder / "refused_float8.pt")
    torch.save({"a": {"w": torch.ones(2, dtype=torch.complex64)}}, folder / "refused_complex.pt")
    torch.save({"a": {"w": torch.ones(2).to_sparse()}}, folder / "refused_sparse.pt")
    torch.save(torch.nn.Linear(1, 1), folder / "refused_module.pt")
    expected["old.pt"], expected["plain.pt"] = described(everything, "", {}), described(plain(), "", {})
    expected["one.pt"] = described(values("float32", 3), "", {})
    expected["distributed"] = described(state, "", {})
    (folder / "expected.json").write_text(json.dumps(expected))


def check(folder):
    """Load the files that we wrote from those above; prints how many tensors are equal."""
    expected, count = json.loads((folder / "expected.json").read_text()), 0
    expected.pop("distributed")
    for name, wanted in expected.items():
        loaded = torch.load(folder / "ours" / name, weights_only=name in ("plain.pt", "one.pt"))
        found = described(loaded, "", {})
        assert found == wanted, [(key, found.get(key), wanted[key]) for key in wanted if found.get(key) != wanted[key]]
        count += len(found)
        if name != "one.pt":
            check_objects(loaded, torch.load(folder / name, weights_only=False), name)
    for name in ("written.pt", "large.pt"):
        whole = torch.load(folder / "ours" / name, weights_only=True)
        assert whole["tied"].data_ptr() == whole["weight"].data_ptr()
        assert torch.equal(whole["weight"], torch.arange(6, dtype=torch.float32).reshape(2, 3))
    print(count)


def check_objects(loaded, saved, name):
    """Compare what is no tensor."""
    views = loaded["views"]
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    assert [view.stride() for view in views] == [view.stride() for view in saved["views"]]
    assert loaded["model"]._metadata == saved["model"]._metadata
    for key in ("parameter", "frozen", "leaf"):
        assert type(loaded[key]) is type(saved[key]) and loaded[key].requires_grad == saved[key].requires_grad
    for key in ("size", "dtype", "bytes", "numbers", "text", "ordered", "set"):
        assert loaded[key] == saved[key] and type(loaded[key]) is type(saved[key]), key
    if name != "plain.pt":
        assert loaded["args"] == saved["args"]
        assert vars(loaded["master"]) == vars(saved["master"])
        assert loaded["stream"].getvalue() == b"abc"
        assert np.array_equal(loaded["array"], saved["array"])
        for key in ("scalar", "counter", "layout", "bytearray", "slice", "frozenset"):
            assert loaded[key] == saved[key] and type(loaded[key]) is type(saved[key]), key
        assert loaded["default"].default_factory is dict


def compare(folder):
    """Load pairs of files and compare all that is in them; prints how many are equal."""
    pairs = [line.split("\t") for line in (folder / "pairs").read_text().splitlines()]
    print(sum(equal(*(torch.load(path, weights_only=False) for path in pair)) for pair in pairs))


def equal(one, other):
    """Whether two objects are of the same types and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return described(one, "", {}) == described(other, "", {}) and equal(vars(one), vars(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(item, other[key]) for key, item in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, argparse.Namespace):
        return equal(vars(one), vars(other))
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


if __name__ == "__main__":
    {"write": write, "check": check, "compare": compare}[sys.argv[1]](pathlib.Path(sys.argv[2]))
