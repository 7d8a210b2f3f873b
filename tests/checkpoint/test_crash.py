"""Whatever happens while a checkpoint is written or after, a run goes on from the newest good one, or says why not."""

import os
import shutil
import signal

import pytest

from mindspeed_ms.core.dist_checkpointing import folders
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.testing.checkpoint_crashes import continued, dies, error_of, full_disk, train
from tests.checkpoint.test_format import damage


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    return world(2)(train, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("seed", [0, 3, 7, 9, 12])  # even: asynchronous
def test_killed_at_any_moment(world, tmp_path, whole, seed):
    async_save = seed % 2 == 0
    outcomes = world(2).outcomes(dies, tmp_path, seed, async_save=async_save)
    assert any(outcome.exit_status == -signal.SIGKILL for outcome in outcomes), outcomes
    world(2).close()
    done = int((tmp_path / "progress").read_text())
    good = [path for path in folders.candidates(str(tmp_path)) if folders.problem_of(path) is None]
    # the save of the last step, or the one that was under way beside it, may be lost; nothing before
    newest = int(good[0].rpartition("_")[2]) if good else 0
    assert newest >= done - 1 - async_save
    assert not good or CheckpointReader(good[0]).verify() == []
    for result, expected in zip(world(2)(train, tmp_path, crc_check=True), whole):
        assert result["losses"] == expected["losses"] and result["norms"] == expected["norms"]
        assert newest == 0 or any(f"at iteration {newest}" in text for text in result["log"])


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_checkpoints(world, tmp_path_factory):
    """Folder of a run with the checkpoints of iterations 3 and 4."""
    folder = tmp_path_factory.mktemp("two")
    world(2)(train, folder)
    return folder


DAMAGES = {
    "shard truncated": ("state_00001.safetensors", "truncate", {}, "state_00001.safetensors has"),
    "shard missing": ("state_00000.safetensors", "remove", {}, "state_00000.safetensors is missing"),
    "byte flipped": ("state_00001.safetensors", "flip", {"crc_check": True}, "the check sum of tensor"),
    "rank file flipped": ("rank_00001.json", "flip", {"crc_check": True}, "rank_00001.json is damaged"),
    "manifest missing": ("manifest.json", "remove", {}, "has no manifest.json"),
    "manifest flipped": ("manifest.json", "flip", {}, "manifest.json is damaged: its check sum is wrong"),
    "tracker names a missing folder": (None, None, {}, "iter_0000009, which latest_checkpointed_iteration.txt names"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_checkpoints_are_passed_over(world, tmp_path, two_checkpoints, case):
    name, kind, options, words = DAMAGES[case]
    folder = tmp_path / "run"
    shutil.copytree(two_checkpoints, folder)
    expected = 3
    if name is None:
        (folder / "latest_checkpointed_iteration.txt").write_text("9")
        expected = 4
    else:
        damage(folder / "iter_0000004" / name, kind)
    log = world(2)(continued, folder, **options)[0]["log"]
    assert any("passed over" in text and words in text for text in log), log
    assert any(f"resumed from {folder}/iter_000000{expected} at iteration {expected}" in text for text in log)


def test_a_flipped_byte_stops_a_load_without_crc_check(world, tmp_path, two_checkpoints):
    folder = tmp_path / "run"
    shutil.copytree(two_checkpoints, folder)
    damage(folder / "iter_0000004" / "state_00001.safetensors", "flip")
    for text in world(2)(error_of, folder):
        assert "state_00001.safetensors is damaged: the check sum of tensor" in text and "crc_check" in text


def test_no_good_checkpoint_left(world, tmp_path, two_checkpoints):
    folder = tmp_path / "run"
    shutil.copytree(two_checkpoints, folder)
    for number in (3, 4):
        (folder / f"iter_000000{number}" / "manifest.json").unlink()
    for text in world(2)(error_of, folder):
        assert "holds no checkpoint that can be read" in text and text.count("has no manifest.json") == 2


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_full_disk(world, tmp_path, two_checkpoints, async_save):
    folder = tmp_path / "run"
    shutil.copytree(two_checkpoints, folder)
    for text in world(2)(full_disk, folder, async_save=async_save):
        assert "the checkpoint was not written: rank 1: [Errno 27] File too large" in text
    assert sorted(name for name in os.listdir(folder) if name.startswith("iter")) == ["iter_0000003", "iter_0000004"]
    log = world(2)(continued, folder)[0]["log"]
    assert any("iter_0000004 at iteration 4" in text for text in log)


def test_a_folder_that_cannot_be_made(world, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for text in world(2)(error_of, tmp_path / "file" / "run"):
        assert "output_dir (--save)" in text and "file/run cannot be used: [Errno 20] Not a directory" in text
