"""A checkpoint of one layout continues in another: losses, gradient norms and weights within 1e-5 of one whole run."""

import os
import random
import shutil

import numpy as np
import pytest

from mindspeed_ms.testing import checkpoint_runs as runs

TP2, TP4 = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 4}
PP2, PP4 = {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}
EP2 = {"expert_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
LAYOUTS = {  # ranks, parallel_config, training_config
    "one": (1, {}, {}),
    "tp2": (2, TP2, {}),
    "tp4": (4, TP4, {}),
    "tp2pp2": (4, {**TP2, **PP2}, {}),
    "tp2dp2z1": (4, {**TP2, "zero_level": "z1"}, {}),
    "pp2dp2": (4, PP2, runs.DIST),
    "pp2lists": (2, {**PP2, "num_layer_list": [1, 3]}, {}),
    "pp2vpp2": (2, VPP2, {}),
    "pp4": (4, PP4, {}),
    "dp2": (2, {}, {}),
    "dp2dist": (2, {}, runs.DIST),
    "dp3dist": (3, {}, runs.DIST),
    "dp4dist": (4, {}, {**runs.DIST, "overlap_grad_reduce": True, "bucket_size": 3000}),
    "dp2z2": (2, {"zero_level": "z2"}, {}),
    "dp4z3": (4, {"zero_level": "z3"}, {}),
    "dp3z3": (3, {"zero_level": "z3"}, {}),
    "ep2": (2, EP2, {}),
    "tp2ep2": (4, {**TP2, **EP2, "sequence_parallel": True}, {}),
    "pp2ep2": (4, {**PP2, **EP2}, runs.DIST),
    "ep2z3": (4, {**EP2, "zero_level": "z3"}, {}),
}
PAIRS = [
    ("tied", "tp4", "tp2pp2"),
    ("tied", "pp4", "pp2vpp2"),
    ("tied", "tp2pp2", "one"),
    ("tied", "one", "pp2lists"),
    ("tied", "pp2lists", "tp4"),
    ("tied", "pp2vpp2", "pp2dp2"),
    ("tied", "pp2dp2", "dp4z3"),
    ("tied", "dp4z3", "one"),
    ("untied", "dp2dist", "dp3dist"),
    ("untied", "dp3dist", "dp4dist"),
    ("untied", "dp4dist", "dp2"),
    ("untied", "dp2z2", "tp2dp2z1"),
    ("untied", "tp2dp2z1", "dp3z3"),
    ("untied", "tp2", "dp2z2"),
    ("experts", "one", "ep2"),
    ("experts", "ep2", "tp2ep2"),
    ("experts", "tp2ep2", "pp2ep2"),
    ("grouped experts", "pp2ep2", "ep2z3"),
    ("grouped experts", "ep2z3", "one"),
    ("further tokens", "one", "pp2ep2"),
    ("further tokens", "pp2ep2", "ep2z3"),
    ("further tokens", "ep2z3", "tp2ep2"),
]


def settings_of(layout, model, **training):
    size, parallel, own = LAYOUTS[layout]
    return size, {"model": model, "parallel": parallel, "training": {**own, **training}}


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory):
    """Function (model, layout) -> (folder of a run that was saved after step 2, its results)."""
    made = {}

    def save(model, layout, **training):
        if (model, layout) not in made:
            folder = tmp_path_factory.mktemp(f"{model}_{layout}")
            size, settings = settings_of(layout, model, exit_interval=2, **training)
            made[model, layout] = folder, world(size)(runs.train, folder, **settings)
        return made[model, layout]

    return save


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """Function (model) -> results of the run in one piece on one rank."""
    made = {}

    def run(model):
        if model not in made:
            made[model] = world(1)(runs.train, tmp_path_factory.mktemp("whole"), model=model)[0]
        return made[model]

    return run


@pytest.mark.parametrize(("model", "before", "after"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_continues_in_another_layout(world, tmp_path, saved, whole, model, before, after):
    folder, _ = saved(model, before)
    size, settings = settings_of(after, model, load_checkpoint=str(folder), resume_training=True, save_interval=None)
    results = world(size)(runs.train, tmp_path, **settings)
    assert_continues(results, whole(model))


def assert_continues(results, reference, steps=(3, 4)):
    from mindspeed_ms.layout.parameters import join

    for result in results:
        assert sorted(result["losses"]) == list(steps)
        for name in ("losses", "norms", "lr"):
            for step in steps:
                np.testing.assert_allclose(result[name][step], reference[name][step], rtol=1e-5)
    for name, (_, values) in reference["weights"].items():
        parts = [result["weights"][name] for result in results if name in result["weights"]]
        np.testing.assert_allclose(join(parts), values, rtol=1e-5, atol=1e-5, err_msg=name)


def test_each_part_is_written_once_and_the_work_is_shared(saved):
    from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
    from mindspeed_ms.layout.parameters import uncovered

    sizes = {}
    for model, layout in (("tied", "tp2pp2"), ("tied", "dp4z3"), ("tied", "one"), ("untied", "dp2dist")):
        folder, _ = saved(model, layout)
        manifest = CheckpointReader(os.path.join(folder, "iter_0000002")).manifest
        for key, tensor in manifest.tensors.items():
            slices = [piece.slice for piece in tensor.pieces]
            assert not uncovered(slices), key
            assert sum(part.stop - part.start for part in slices) == np.prod(tensor.shape), key
        sizes[layout] = list(manifest.files.values())
    assert len(sizes["tp2pp2"]) == len(sizes["dp4z3"]) == 4 and len(sizes["dp2dist"]) == 2
    for layout in ("dp4z3", "dp2dist"):
        assert max(sizes[layout]) < 1.2 * min(sizes[layout])
    assert abs(sum(sizes["dp4z3"]) - sum(sizes["one"])) < 0.1 * sum(sizes["one"])


FLIPS = 12


def found_flips(load, settings, folder):
    """[(file that had one bit flipped, message of the load)], FLIPS times at random places of the tensors."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
    from mindspeed_ms.training import checkpointing

    choice, found, original = random.Random(5), [], checkpointing.load_tensors

    def flip(path, position, bit):
        if comm.get_rank() == 0:
            with open(path, "r+b") as file:
                file.seek(position)
                value = file.read(1)[0]
                file.seek(position)
                file.write(bytes([value ^ 1 << bit]))
        comm.world_group().barrier()

    def load_damaged(reader, tensors, *arguments):
        pieces = [piece for stored in reader.manifest.tensors.values() for piece in stored.pieces]
        for _ in range(FLIPS):
            piece = choice.choice(pieces)
            place = os.path.join(reader.folder, piece.file), choice.randrange(piece.start, piece.stop), choice.randrange(8)
            flip(*place)
            try:
                original(reader, tensors, *arguments)
                message = ""
            except CheckpointError as error:
                message = str(error)
            found.append((piece.file, message))
            comm.world_group().barrier()
            flip(*place)
        original(reader, tensors, *arguments)

    checkpointing.load_tensors = load_damaged
    try:
        settings["training"] |= {"load_checkpoint": str(load), "resume_training": True, "exit_interval": 3}
        runs.train(folder, **settings)
    finally:
        checkpointing.load_tensors = original
    return found


@pytest.mark.parametrize(
    ("model", "before", "after"), [PAIRS[0], PAIRS[6], PAIRS[7], PAIRS[9], PAIRS[12]], ids=lambda value: value
)
def test_a_flipped_bit_is_found_in_any_layout(world, tmp_path, saved, model, before, after):
    """Without crc_check, also where every rank reads only a part of what was stored in one piece."""
    size, settings = settings_of(after, model)
    load = tmp_path / "damaged"
    shutil.copytree(saved(model, before)[0], load)
    for found in world(size)(found_flips, load, settings, tmp_path / "run"):
        for file, message in found:
            assert f"{file} is damaged: the check sum of tensor" in message, (file, message)
