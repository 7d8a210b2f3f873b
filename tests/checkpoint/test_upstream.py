"""Upstream's files: written so that they load in any layout, and read where upstream wrote them."""

import json
import os
import shutil
from unittest import mock

import numpy as np
import pytest
import yaml

from mindspeed_ms.core.dist_checkpointing import ckpt_file, folders
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.dist_checkpointing.shard_file import Entry, write_shard
from mindspeed_ms.core.dist_checkpointing.upstream_format import is_upstream_folder, read_upstream_manifest
from mindspeed_ms.testing import checkpoint_runs as runs
from mindspeed_ms.tools.checkpoint.__main__ import main
from tests.checkpoint.test_format import damage

TP2PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
SWIGLU, NET = {"hidden_act": "swiglu"}, {"prefix": "net", "crc_check": True}
EMBEDDING = "language_model.embedding.word_embeddings.weight"


def both_ways(folder):
    """What MindSpore reads of our .ckpt file, and we of MindSpore's."""
    import mindspore as ms

    values = {
        "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "half": np.ones((2, 300), np.float16),
        "flag": np.array([True]),
    }
    entries = [
        Entry(name, array.dtype.name, array.shape, array.nbytes, array.reshape(-1).view(np.uint8))
        for name, array in values.items()
    ]
    bits = np.array([0x3F80, 0xC000], np.uint16)
    entries += [
        Entry("bf16", "bfloat16", (2,), 4, bits.view(np.uint8)),
        Entry("step_num", "int64", (), 8, np.array([300]).view(np.uint8)),
    ]
    write_shard(folder / "ours.ckpt", entries, verify=True)
    ours = ms.load_checkpoint(str(folder / "ours.ckpt"))
    assert all(ours[name].asnumpy().tobytes() == array.tobytes() for name, array in values.items())
    assert ours["bf16"].dtype == ms.bfloat16 and ours["bf16"].float().asnumpy().tolist() == [1.0, -2.0]
    assert ours["step_num"].shape == () and int(ours["step_num"]) == 300
    params = [{"name": name, "data": ms.Tensor(array)} for name, array in values.items()]
    params.append({"name": "bf16", "data": ms.Tensor(np.array([1.0, -2.0], np.float32)).astype(ms.bfloat16)})
    with mock.patch.object(ms.train.serialization, "SLICE_SIZE", 1):  # kB: the largest tensor stands in several pieces
        for format, crc_check in (("ckpt", False), ("ckpt", True), ("safetensors", False)):
            ms.save_checkpoint(
                params,
                str(folder / f"theirs{crc_check}.{format}"),
                append_dict={"epoch_num": 3},
                crc_check=crc_check,
                format=format,
            )
    return True


def test_mindspore_and_we_read_the_same(world, tmp_path):
    assert world(1)(both_ways, tmp_path) == [True]
    for crc_check in (False, True):
        found = ckpt_file.read_tensors(tmp_path / f"theirs{crc_check}.ckpt")
        assert found["weight"].shape == (3, 4) and found["bf16"].dtype == "bfloat16" and found["epoch_num"].shape == ()
        assert len(found["half"].ranges) > 1
        data = (tmp_path / f"theirs{crc_check}.ckpt").read_bytes()
        for name, expected in (
            ("weight", np.arange(12, dtype=np.float32)),
            ("half", np.ones(600, np.float16)),
            ("bf16", np.array([0x3F80, 0xC000], np.uint16)),
        ):
            assert b"".join(data[start:stop] for start, stop in found[name].ranges) == expected.tobytes()
    for size in (10, len(data) - 20):
        (tmp_path / "short.ckpt").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"short.ckpt cannot be read as a .ckpt file"):
            ckpt_file.read_tensors(tmp_path / "short.ckpt")


def saved(folder, **settings):
    training = {"exit_interval": 2, **settings.pop("training", {})}
    return runs.train(folder, training=training, **settings)


def continued(folder, load, **settings):
    training = {"load_checkpoint": str(load), "resume_training": True, **settings.pop("training", {})}
    return runs.train(folder, training=training, **settings)


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """Run of one rank that was not ended."""
    return world(1)(runs.train, tmp_path_factory.mktemp("whole"), sizes=SWIGLU)[0]


@pytest.fixture(scope="module")
def _four(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    world(4)(saved, folder, parallel=TP2PP2, sizes=SWIGLU, training={"ckpt_format": "ckpt", **NET})
    return folder


@pytest.fixture
def four(_four, tmp_path):
    """Folder of a run of four ranks that saved upstream's files at its second step; a copy that may be changed."""
    return shutil.copytree(_four, tmp_path / "four")


def check_names(folder, ckpt_format, ranks, step):
    for rank in range(ranks):
        name = f"net_rank_{rank}-0_{step}.{ckpt_format}"
        assert (folder / f"rank_{rank}" / name).is_file()
        meta = json.loads((folder / f"rank_{rank}" / "meta.json").read_text())
        assert meta == {"last_epoch": 0, "last_step": step, "last_ckpt_file": name}


def test_upstreams_files_load_in_any_layout(world, tmp_path, whole, four):
    """One format after the other, each written in one layout and read in another."""
    folder, second = four / "iter_0000002", tmp_path / "two" / "iter_0000004"
    check_names(folder, "ckpt", 4, 2)
    other = {**runs.DIST, "async_save": True, "ckpt_format": "safetensors", **NET}
    for result in world(2)(continued, tmp_path / "two", folder, training=other, sizes=SWIGLU):
        for step in (3, 4):
            np.testing.assert_allclose(result["losses"][step], whole["losses"][step], rtol=1e-5)
    check_names(second, "safetensors", 2, 4)
    (result,) = world(1)(continued, tmp_path / "one", second, training={"training_iters": 5}, sizes=SWIGLU)
    assert list(result["losses"]) == [5]
    # a damaged one is passed over, the manifest alone makes it complete
    damage(folder / "rank_1" / "net_rank_1-0_2.ckpt", "flip")
    damage(second / "rank_1" / "net_rank_1-0_4.safetensors", "flip")
    for one in (folder, second):
        assert CheckpointReader(one).verify() != []
        damage(one / "manifest.json", "remove")
        assert not is_upstream_folder(one) and "has no manifest.json" in folders.problem_of(str(one))


def as_upstream(folder):
    """Files of a run in the format of upstream, without anything of ours."""
    shutil.copytree(folder / "iter_0000002", folder / "upstream")
    for name in os.listdir(folder / "upstream"):
        if not name.startswith("rank_") or name.endswith(".json"):
            os.remove(folder / "upstream" / name)
    return folder / "upstream"


def test_what_upstream_wrote_is_read(world, tmp_path, four):
    path = as_upstream(four)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"model_config": {**runs.MODELS["tied"], **SWIGLU}}))
    assert main(["merge", str(path), str(tmp_path / "ours")]) == 2  # it needs the configuration
    assert main(["merge", str(path), str(tmp_path / "ours"), "--config", str(config)]) == 0
    assert main(["diff", str(four / "iter_0000002"), str(tmp_path / "ours"), "--weights-only"]) == 0
    weights = world(2)(
        continued,
        tmp_path / "two",
        path,
        sizes=SWIGLU,
        parallel={"pipeline_model_parallel_size": 2},
        optimizer={"learning_rate": 1e-12, "weight_decay": 0.0},
        training={"resume_training": False, "training_iters": 1},
    )
    with CheckpointReader(four / "iter_0000002") as reader:
        for result in weights:
            for key, (_, values) in result["weights"].items():
                if key in reader.manifest.tensors:
                    np.testing.assert_allclose(values, reader.read_whole(key), rtol=1e-4, atol=1e-6)
    for message in world(2)(error_of, tmp_path / "three", path, sizes=SWIGLU):
        assert "cannot be continued: state_step, lr_warmup_steps, num_steps ... is not stored. Load" in message


SCHEDULE = {
    "max_lr": 0.01,
    "min_lr": 0.0,
    "start_wd": 0.1,
    "end_wd": 0.1,
    "lr_warmup_steps": 0,
    "num_steps": 24,
    "lr_decay_style": 2,
    "lr_decay_steps": 48,
    "wd_incr_style": 0,
    "wd_incr_steps": 48,
    "state_step": 2,
    "epoch_num": 0,
    "step_num": 2,
}


def with_more(path, change=lambda tensors: tensors, numbers=SCHEDULE):
    """Write the files of all ranks anew with numbers beside the tensors, as upstream does."""
    for name in path.glob("rank_*/*.ckpt"):
        data = name.read_bytes()
        tensors = {
            key: (tensor.dtype, tensor.shape, b"".join(data[start:stop] for start, stop in tensor.ranges))
            for key, tensor in change(ckpt_file.read_tensors(name)).items()
            if key not in numbers
        }
        for key, value in numbers.items():
            array = np.array(value, np.int64 if isinstance(value, int) else np.float64)
            tensors[key] = (array.dtype.name, (), array.tobytes())
        write_shard(
            name,
            [
                Entry(key, dtype, shape, len(values), np.frombuffer(values, np.uint8))
                for key, (dtype, shape, values) in tensors.items()
            ],
        )


def test_upstreams_optimizer_goes_on(world, tmp_path, whole, four):
    path = as_upstream(four)
    with_more(path)
    for size, settings in ((4, {"parallel": TP2PP2}), (2, {"training": runs.DIST})):
        for result in world(size)(continued, tmp_path / str(size), path, sizes=SWIGLU, **settings):
            assert sorted(result["losses"]) == [3, 4] and result["lr"] == {step: whole["lr"][step] for step in (3, 4)}
            for step in (3, 4):
                np.testing.assert_allclose(result["losses"][step], whole["losses"][step], rtol=1e-5)
    buffers = "exp_avg.buffer_0_bucket_0"
    with_more(path, lambda tensors: {buffers: tensors.pop(f"exp_avg.{EMBEDDING}", None) or tensors["step_num"], **tensors})
    (message,) = world(1)(error_of, tmp_path / "buffers", path, sizes=SWIGLU)
    assert "it stands in the buffers of a distributed optimizer" in message
    with_more(path, lambda tensors: {key: tensor for key, tensor in tensors.items() if key != buffers})
    (message,) = world(1)(error_of, tmp_path / "parts", path, sizes=SWIGLU)
    assert f"exp_avg.{EMBEDDING} is missing" in message
    (result,) = world(1)(continued, tmp_path / "afresh", path, training={"no_load_optim": True}, sizes=SWIGLU)
    assert sorted(result["losses"]) == [3, 4]


def error_of(folder, load, **settings):
    with pytest.raises(CheckpointError) as caught:
        continued(folder, load, **settings)
    return str(caught.value)


def upstream_files(folder, ranks=(0, 1), steps=(10, 20), rows=32):
    """Word embeddings and a projection of a small model, cut over two ranks, by hand."""
    values, projection = {}, "language_model.encoder.layers.0.attention.out_proj.weight"
    for rank in ranks:
        os.makedirs(folder / f"rank_{rank}", exist_ok=True)
        for step in steps:
            values[rank, step] = {
                EMBEDDING: np.full((rows, 32), rank + step, np.float32),
                projection: np.full((32, 16), rank, np.float32),
                "default_generator": np.zeros(3, np.uint8),
            }
            write_shard(
                folder / f"rank_{rank}" / f"network_rank_{rank}-0_{step}.ckpt",
                [
                    Entry(name, array.dtype.name, array.shape, array.nbytes, array.reshape(-1).view(np.uint8))
                    for name, array in values[rank, step].items()
                ],
            )
    return values


def test_the_newest_step_of_all_ranks_is_taken(tmp_path):
    config = runs.make_config(tmp_path)
    values = upstream_files(tmp_path / "up")
    path = tmp_path / "up"

    def embedding(step=None):
        manifest = read_upstream_manifest(path, config, step)
        with CheckpointReader(path, manifest) as reader:
            return manifest.iteration, reader.read_whole(EMBEDDING)

    def expected(step):
        return np.concatenate([values[rank, step][EMBEDDING] for rank in (0, 1)])

    assert embedding()[0] == 20 and np.array_equal(embedding()[1], expected(20))
    os.remove(path / "rank_1" / "network_rank_1-0_20.ckpt")
    assert embedding()[0] == 10 and np.array_equal(embedding()[1], expected(10))
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 20 of all ranks \[0, 1\]"):
        embedding(20)
    for rank in (0, 1):  # the converter's name
        shutil.copy(path / f"rank_{rank}" / f"network_rank_{rank}-0_10.ckpt", path / f"rank_{rank}" / "network.ckpt")
        os.remove(path / f"rank_{rank}" / f"network_rank_{rank}-0_10.ckpt")
    os.remove(path / "rank_0" / "network_rank_0-0_20.ckpt")
    assert np.array_equal(embedding()[1], expected(10))
    with pytest.raises(CheckpointError, match="does not hold this model"):
        read_upstream_manifest(path, runs.make_config(tmp_path, sizes={"hidden_size": 36, "num_attention_heads": 4}))
