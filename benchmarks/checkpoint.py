"""Speed and memory of saving and loading, beside MindSpore's own functions and a plain copy of bytes.

    python benchmarks/checkpoint.py [--tensors 4] [--mebibytes 64] [--repeats 7] [--folder DIR]

One rank, float32 tensors. Every write ends with an fsync, and the files are dropped from the page cache before a load (where
the system allows it), for all alike; the best of the repeats counts. "Blocked" is the time that the training loop spends in
calls of the saver during an asynchronous save. "Plain bytes" are written from the tensors'
memory to one file, and read back into it. Extra memory is the peak of resident memory above what was there before, in a
repeat of its own. Prints one table; exit code 1 if one of `PROMISES` is not kept.
"""

import ctypes
import gc
import os
import shutil
import sys
import tempfile
import time

from mindspeed_ms.spelling import SuggestingParser
from mindspeed_ms.testing.memory import peak_of

PROMISES = (
    ("saving is as fast as MindSpore's .ckpt", lambda rows, size: rows["ours"]["save"] <= rows["mindspore .ckpt"]["save"]),
    (
        "saving is as fast as MindSpore's safetensors",
        lambda rows, size: rows["ours"]["save"] <= rows["mindspore safetensors"]["save"],
    ),
    ("loading is as fast as MindSpore's .ckpt", lambda rows, size: rows["ours"]["load"] <= rows["mindspore .ckpt"]["load"]),
    (
        "saving takes at most twice as long as writing the bytes",
        lambda rows, size: rows["ours"]["save"] <= 2 * rows["plain bytes"]["save"],
    ),
    (
        "an asynchronous save blocks at most half of a synchronous one",
        lambda rows, size: rows["ours, asynchronous"]["blocked"] <= 0.5 * rows["ours"]["save"],
    ),
    (
        "a save needs less than 1.2 of the largest tensor",
        lambda rows, size: rows["ours"]["save_memory"] < 1.2 * size["largest"],
    ),
    (
        "a load needs less than 1.2 of the largest tensor",
        lambda rows, size: rows["ours"]["load_memory"] < 1.2 * size["largest"],
    ),
    (
        "an asynchronous save needs one copy of the state",
        lambda rows, size: rows["ours, asynchronous"]["save_memory"] < 1.05 * size["state"],
    ),
)


def best(function, repeats, before=None):
    """Seconds of the fastest call."""
    times = []
    for _ in range(repeats):
        if before is not None:
            before()
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def peak(function, before=None):
    """Bytes of extra memory at the peak of a call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if before is not None:
        before()
    return max(0, peak_of(function))


def forget(folder):
    """Drop the files of a folder from the page cache."""
    for place, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(place, name), os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(folder, count, mebibytes, repeats):
    """{name: {save, load, blocked in seconds, save_memory, load_memory in bytes}}; runs in a rank of a forked world."""
    import numpy as np

    from mindspeed_ms.core import storage
    from mindspeed_ms.core.dist_checkpointing.manifest import whole_slice
    from mindspeed_ms.core.dist_checkpointing.state import ShardedTensor
    from mindspeed_ms.layout.sharding import ParameterSharding

    whole = whole_slice(ParameterSharding.replicated((mebibytes, 1 << 18)))
    tensors = [
        ShardedTensor(f"tensor{number}", whole, storage.FlatBuffer(mebibytes << 18, "float32").tensor)
        for number in range(count)
    ]
    for number, tensor in enumerate(tensors):
        storage.host_array(tensor.tensor)[:] = np.random.RandomState(number).standard_normal(mebibytes << 18)
    rows = {"plain bytes": _plain(os.path.join(folder, "plain"), tensors, repeats)}
    for name, options in (("ours", {}), ("ours, ckpt_format ckpt", {"ckpt_format": "ckpt"})):
        rows[name] = _ours(os.path.join(folder, name.replace(" ", "_")), tensors, repeats, options)
    rows["ours, asynchronous"] = _asynchronous(os.path.join(folder, "async"), tensors, repeats)
    for name, kind in (("mindspore .ckpt", "ckpt"), ("mindspore safetensors", "safetensors")):
        rows[name] = _mindspore(os.path.join(folder, kind), tensors, repeats, kind)
    return rows


def _plain(folder, tensors, repeats):
    from mindspeed_ms.core import storage

    os.makedirs(folder)
    path = os.path.join(folder, "bytes")

    def save():
        with open(path, "wb", buffering=0) as file:
            for tensor in tensors:
                file.write(storage.host_array(tensor.tensor))
            os.fsync(file.fileno())

    def load():
        with open(path, "rb", buffering=0) as file:
            for tensor in tensors:
                file.readinto(storage.host_array(tensor.tensor))

    return _all(save, load, folder, repeats)


def _all(save, load, folder, repeats):
    def fresh():  # files that nobody has mapped
        save()
        forget(folder)

    result = {
        "save": best(save, repeats),
        "load": best(load, repeats, fresh),
        "save_memory": peak(save),
        "load_memory": peak(load, fresh),
    }
    shutil.rmtree(folder)
    return result


def _ours(folder, tensors, repeats, options):
    from mindspeed_ms.core.dist_checkpointing.load import load_tensors, open_checkpoint
    from mindspeed_ms.core.dist_checkpointing.manifest import Manifest
    from mindspeed_ms.core.dist_checkpointing.save import CheckpointSaver

    saver = CheckpointSaver(folder, **options)

    def load():
        with open_checkpoint(os.path.join(folder, "iter_0000001")) as reader:
            load_tensors(reader, tensors)

    return _all(lambda: saver.save(Manifest(1), tensors, {}), load, folder, repeats)


def _asynchronous(folder, tensors, repeats):
    from mindspeed_ms.core.dist_checkpointing.manifest import Manifest
    from mindspeed_ms.core.dist_checkpointing.save import CheckpointSaver

    saver, blocked = CheckpointSaver(folder, async_save=True), []

    def timed(function, *arguments):
        started = time.perf_counter()
        function(*arguments)
        blocked[-1] += time.perf_counter() - started

    def save():
        blocked.append(0.0)
        timed(saver.save, Manifest(1), tensors, {})
        while saver.is_saving:
            time.sleep(0.02)  # a step of the training
            timed(saver.poll)

    result = {"save": best(save, repeats), "blocked": min(blocked), "save_memory": peak(save)}
    shutil.rmtree(folder)
    return result


def _mindspore(folder, tensors, repeats, kind):
    import mindspore as ms

    os.makedirs(folder)
    path = os.path.join(folder, f"state.{kind}")
    cell = ms.nn.Cell()
    for tensor in tensors:
        cell.insert_param_to_cell(tensor.key, ms.Parameter(tensor.tensor, name=tensor.key))
    names = [{"name": name, "data": param} for name, param in cell.parameters_and_names()]

    def save():
        ms.save_checkpoint(names, path, format=kind)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def load():
        ms.load_param_into_net(cell, ms.load_checkpoint(path, format=kind))
        for _, param in cell.parameters_and_names():
            param.asnumpy().reshape(-1)[::1024].sum()  # safetensors are mapped: only now the file is read

    return _all(save, load, folder, repeats)


def report(rows, size):
    """Print the table and the promises; number of those that are not kept."""
    print(f"{size['state'] / 1e9:.2f} GB in tensors of {size['largest'] / 1e6:.0f} MB; seconds (GB/s); extra memory in tensors")
    print(f"{'':26}{'save':>16}{'load':>16}{'blocked':>10}{'save memory':>13}{'load memory':>13}")
    for name, row in rows.items():
        cells = [
            f"{row[what]:8.3f} ({size['state'] / 1e9 / row[what]:5.2f})" if what in row else "" for what in ("save", "load")
        ]
        cells.append(f"{row['blocked']:8.3f}" if "blocked" in row else "")
        memory = [f"{row[what] / size['largest']:11.2f}" if what in row else "" for what in ("save_memory", "load_memory")]
        print(f"{name:26}{cells[0]:>16}{cells[1]:>16}{cells[2]:>10}{memory[0]:>13}{memory[1]:>13}")
    missed = 0
    for text, is_kept in PROMISES:
        kept = is_kept(rows, size)
        missed += not kept
        print(f"{'kept  ' if kept else 'MISSED'}  {text}")
    return missed


def main():
    """Measure in a fresh rank; returns the exit code."""
    parser = SuggestingParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tensors", type=int, default=4)
    parser.add_argument("--mebibytes", type=int, default=64, help="of a tensor")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", help="on the disk to measure; by default the system's for temporary files")
    arguments = parser.parse_args()
    from mindspeed_ms.testing.worlds import World, close_nursery

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, World(1) as world:
        (rows,) = world(measure, folder, arguments.tensors, arguments.mebibytes, arguments.repeats)
    close_nursery()
    size = {"largest": arguments.mebibytes << 20, "state": arguments.tensors * arguments.mebibytes << 20}
    return 1 if report(rows, size) else 0


if __name__ == "__main__":
    sys.exit(main())
