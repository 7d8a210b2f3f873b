"""The command line for checkpoints: no device, no MindSpore, the same values in every layout."""

import json
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from mindspeed_ms.config import init_configs_from_dict
from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing import durable, folders
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import MANIFEST_FILE, Manifest, optimizer_key, whole_slice
from mindspeed_ms.core.dist_checkpointing.new_folder import new_folder
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader, numpy_dtype
from mindspeed_ms.layout.parameters import describe_parameters, describe_whole_model
from mindspeed_ms.layout.ranks import WorldLayout
from mindspeed_ms.layout.sharding import ParameterSharding
from mindspeed_ms.tools.checkpoint import rewrite
from mindspeed_ms.tools.checkpoint.__main__ import main
from tests.checkpoint.test_format import damage, write_checkpoint

CONFIG = {
    "model_config": {
        "num_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "ffn_hidden_size": 32,
        "seq_length": 8,
        "vocab_size": 24,
        "hidden_act": "swiglu",
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
    }
}
WORDS = "language_model.embedding.word_embeddings.weight"
PROJECTION = "language_model.encoder.layers.1.mlp.projection.weight"


def save(folder, iteration=7, change=None, dtype="bfloat16", vocab_size=20):
    """A checkpoint of whole tensors with made-up values; `change(values)` may alter {key: [dtype, array]}."""
    config = init_configs_from_dict(CONFIG)
    random, values, grouping = np.random.RandomState(1), {}, {}
    for described in describe_whole_model(describe_model(config)):
        shape = described.sharding.global_shape
        grouping[described.name] = described.grouping
        values[described.name] = [
            dtype,
            random.uniform(1, 2, shape).astype(np.float16).view(np.uint16).view(numpy_dtype(dtype))
            if dtype != "float32"
            else random.uniform(1, 2, shape).astype(np.float32),
        ]
        values[optimizer_key("exp_avg", described.name)] = ["float32", random.uniform(1, 2, shape).astype(np.float32)]
    if change is not None:
        change(values)
    path = folders.checkpoint_folder(str(folder), iteration)
    os.makedirs(path)
    write_checkpoint(
        path,
        {key: (kind, array, [whole_slice(ParameterSharding.replicated(array.shape))]) for key, (kind, array) in values.items()},
        iteration=iteration,
    )
    manifest = Manifest.read(path)
    manifest.args, manifest.vocab_size, manifest.states = config.to_dict(), vocab_size, {"train_state": {"iteration": 7}}
    for key, stored in manifest.tensors.items():
        stored.grouping = grouping.get(key.removeprefix("optimizer.state.exp_avg."))
    durable.write_file(os.path.join(path, MANIFEST_FILE), manifest.to_bytes())
    durable.replace_file(os.path.join(str(folder), folders.TRACKER_FILE), str(iteration).encode())
    return path


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "run")
    return str(tmp_path / "run")


def run(capsys, *arguments):
    """(exit code, output, error output) of a command."""
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_inspect(capsys, saved):
    code, text, _ = run(capsys, "inspect", saved, "--slices")
    assert code == 0 and "iteration 7" in text and f"{WORDS} " in text and "[24, 16]" in text and " vocab" in text
    code, text, _ = run(capsys, "inspect", saved, "--json")
    described = json.loads(text)
    assert described["iteration"] == 7 and described["tensors"][WORDS]["bytes"] == 24 * 16 * 2
    assert described["totals"]["optimizer"]["elements"] == described["totals"]["weights"]["elements"] > 10_000


LAYOUTS = [(2, 1, None, 1), (1, 4, None, 3), (4, 2, None, 2), (2, 2, 2, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reshard(capsys, tmp_path, saved, layout):
    tp, pp, vpp, dp = layout
    flags = ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp, "--data-parallel-size", dp]
    flags += ["--virtual-pipeline-model-parallel-size", vpp] if vpp else []
    code, _, error = run(capsys, "reshard", saved, tmp_path / "new", *flags)
    assert code == 0, error
    assert run(capsys, "diff", saved, tmp_path / "new")[0] == 0
    assert run(capsys, "verify", tmp_path / "new")[0] == 0
    config = init_configs_from_dict(
        {
            **CONFIG,
            "parallel_config": {
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "virtual_pipeline_model_parallel_size": vpp,
            },
        }
    )
    world = WorldLayout.from_description(describe_model(config).parallel, tp * pp * dp)
    manifest = Manifest.read(tmp_path / "new" / "iter_0000007")
    for rank in range(world.world_size):
        at = world.coordinates(rank)
        wanted = {
            described.name: described.sharding
            for described in describe_parameters(describe_model(config), at)
            if at.dp == 0 and (at.tp == 0 or described.tensor_parallel)
        }
        found = {
            key: piece.slice.sharding
            for key, stored in manifest.tensors.items()
            for piece in stored.pieces
            if piece.file == f"state_{rank:05d}.safetensors" and not key.startswith("optimizer")
        }
        assert found == wanted


def test_other_vocabulary_padding_and_other_models(capsys, tmp_path, saved):
    def longer(values):
        for key in (WORDS, optimizer_key("exp_avg", WORDS)):
            values[key][1] = np.concatenate([values[key][1], values[key][1][:2]])

    save(tmp_path / "padded", change=longer)
    assert run(capsys, "diff", saved, tmp_path / "padded")[0] == 0
    code, _, error = run(capsys, "reshard", tmp_path / "padded", tmp_path / "new", "--tensor-model-parallel-size", 4)
    assert code == 0, error
    assert run(capsys, "diff", tmp_path / "padded", tmp_path / "new")[0] == 0
    assert Manifest.read(tmp_path / "new" / "iter_0000007").tensors[WORDS].shape == (26, 16)
    save(tmp_path / "other", change=lambda values: values.update(extra=values.pop(PROJECTION)))
    code, _, error = run(capsys, "reshard", tmp_path / "other", tmp_path / "new2", "--tensor-model-parallel-size", 2)
    assert code == 2 and PROJECTION in error and "--config" in error and not (tmp_path / "new2").exists()


def test_diff(capsys, tmp_path, saved):
    def change(values):
        values[PROJECTION][1] = values[PROJECTION][1].copy()
        values[PROJECTION][1][3, 2] ^= 1
        values[optimizer_key("exp_avg", WORDS)][1][0, 5] = np.nan
        del values[optimizer_key("exp_avg", PROJECTION)]

    save(tmp_path / "other", change=change)
    code, text, _ = run(capsys, "diff", saved, tmp_path / "other")
    lines = dict(line.split(": ", 1) for line in text.splitlines())
    assert code == 1 and len(lines) == 4 and "3 differences" in text
    assert lines[PROJECTION].startswith("1 of 512 elements differ, by ") and f"(element {3 * 32 + 2})" in lines[PROJECTION]
    assert "differ, by inf" in lines[optimizer_key("exp_avg", WORDS)]
    assert lines[optimizer_key("exp_avg", PROJECTION)] == f"only in {saved}/iter_0000007"
    assert run(capsys, "diff", saved, tmp_path / "other", "--weights-only")[0] == 1
    assert run(capsys, "diff", saved, tmp_path / "other", "--weights-only", "--rtol", 0.01)[0] == 0
    assert run(capsys, "diff", saved, tmp_path / "other", "--rtol", 0.01)[0] == 1  # not a number is never close


def test_diff_of_dtypes(capsys, tmp_path):
    def widen(values):
        for entry in values.values():
            if entry[0] == "bfloat16":
                entry[:] = ["float32", (entry[1].astype(np.uint32) << 16).view(np.float32)]

    save(tmp_path / "half")
    save(tmp_path / "full", change=widen)
    code, text, _ = run(capsys, "diff", tmp_path / "half", tmp_path / "full")
    assert code == 1 and f"{WORDS}: dtype bfloat16 and float32\n" in text
    assert run(capsys, "diff", tmp_path / "half", tmp_path / "full", "--ignore-dtype")[0] == 0


def edited(path, change):
    """Change a manifest and give it a right check sum."""
    manifest = Manifest.read(path)
    change(manifest.tensors[WORDS].pieces)
    durable.write_file(os.path.join(path, MANIFEST_FILE), manifest.to_bytes())


def other_copy(pieces):
    first = pieces[0]
    pieces.append(type(first)(first.slice, first.file, first.start - 64, first.stop - 64, "0" * 16, "0" * 16))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: damage(path / "state_00000.safetensors", "flip"), "the check sum of tensor"),
        (lambda path: damage(path / "state_00000.safetensors", "truncate"), "bytes instead of"),
        (lambda path: damage(path / MANIFEST_FILE, "flip"), "its check sum is wrong"),
        (lambda path: damage(path / MANIFEST_FILE, "remove"), f"no {MANIFEST_FILE}"),
        (lambda path: edited(path, lambda pieces: pieces.clear()), "elements 0 to 384 are stored nowhere"),
        (lambda path: edited(path, other_copy), "hold different values of the same elements"),
    ],
    ids=["flip", "truncate", "manifest flipped", "manifest missing", "part missing", "copies differ"],
)
def test_verify(capsys, tmp_path, change, words):
    for iteration in (7, 9):
        save(tmp_path / "run", iteration)
    assert run(capsys, "verify", tmp_path / "run")[0] == 0
    change(tmp_path / "run" / "iter_0000007")
    code, text, _ = run(capsys, "verify", tmp_path / "run")
    assert code == 1 and words in text and "iter_0000009: good" in text and "iter_0000007: damaged" in text
    for command in ("reshard", "merge"):
        code, text, error = run(capsys, command, tmp_path / "run" / "iter_0000007", tmp_path / "new")
        assert code == 1 and words in error and not (tmp_path / "new").exists()


def test_reshard_into_a_folder_with_other_files(capsys, saved, tmp_path):
    """Refused; what a killed call leaves there does not count."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine.txt").write_text("")
    flags = ("--tensor-model-parallel-size", 2)
    code, _, error = run(capsys, "reshard", saved, target, *flags)
    assert code == 2 and "holds other files" in error and os.listdir(target) == ["mine.txt"]
    os.remove(target / "mine.txt")
    (target / "iter_0000007.ab.incomplete").mkdir()
    assert run(capsys, "reshard", saved, target, *flags)[0] == 0


def test_overlapping_parts_and_wrong_headers(capsys, saved):
    path = os.path.join(saved, "iter_0000007")
    rows = whole_slice(ParameterSharding((24, 16), 0, ((4, 8),)))
    edited(
        path,
        lambda pieces: pieces.append(
            type(pieces[0])(rows, pieces[0].file, pieces[0].start, pieces[0].start + 128, "0" * 16, "0" * 16)
        ),
    )
    assert f"{WORDS}: elements 64 to 128 are stored twice" in run(capsys, "verify", path)[1]
    name = os.path.join(path, "state_00000.safetensors")
    with open(name, "r+b") as file:
        content = file.read().replace(b"layers.1.mlp.projection", b"layers.1.mlp.projectiun", 1)
        file.seek(0)
        file.write(content)
    assert "state_00000.safetensors: its header does not name the bytes of tensor" in run(capsys, "verify", path)[1]


def test_merge(capsys, tmp_path):
    from safetensors.numpy import load_file

    saved = tmp_path / "run"
    save(saved, dtype="float16")
    assert run(capsys, "reshard", saved, tmp_path / "cut", "--tensor-model-parallel-size", 2, "--data-parallel-size", 3)[0] == 0
    assert run(capsys, "merge", tmp_path / "cut", tmp_path / "whole", "--max-file-size", 2e-5)[0] == 0
    assert run(capsys, "diff", saved, tmp_path / "whole")[0] == 0
    manifest = Manifest.read(tmp_path / "whole" / "iter_0000007")
    assert all(len(stored.pieces) == 1 for stored in manifest.tensors.values()) and len(manifest.files) > 2
    assert run(capsys, "merge", tmp_path / "cut", tmp_path / "weights", "--weights-only", "--max-file-size", 1e-5)[0] == 0
    index = json.loads((tmp_path / "weights" / "model.safetensors.index.json").read_text())
    assert PROJECTION in index["weight_map"] and not any(key.startswith("optimizer") for key in index["weight_map"])
    with CheckpointReader(tmp_path / "cut" / "iter_0000007") as reader:
        for name in sorted(set(index["weight_map"].values())):
            for key, values in load_file(tmp_path / "weights" / name).items():
                assert index["weight_map"][key] == name
                whole = reader.read_whole(key)
                rows = 20 if reader.tensor(key).grouping == "vocab" else len(whole)  # without padding
                assert len(values) == rows and values.tobytes() == whole[:rows].tobytes()
    for output in ("whole", "weights"):
        code, _, error = run(capsys, "merge", saved, tmp_path / output, *(["--weights-only"] if output == "weights" else []))
        assert code == 2 and f"{output} " in error and "choose a" in error


def test_a_fingerprint_is_kept(capsys, tmp_path, saved):
    path = os.path.join(saved, "iter_0000007")
    manifest = Manifest.read(path)
    manifest.fingerprint = {"tokenizer": {"hash": "1"}, "data": None}
    durable.write_file(os.path.join(path, MANIFEST_FILE), manifest.to_bytes())
    assert run(capsys, "reshard", saved, tmp_path / "cut", "--tensor-model-parallel-size", 2)[0] == 0
    assert run(capsys, "merge", tmp_path / "cut", tmp_path / "whole")[0] == 0
    assert Manifest.read(tmp_path / "whole" / "iter_0000007").fingerprint == manifest.fingerprint


def test_memory_is_bounded_by_the_largest_tensor(tmp_path):
    shape = (256, 16384)
    values = {
        f"weight{number}": (
            "float32",
            np.ones(shape, np.float32),
            [whole_slice(ParameterSharding.contiguous(shape, 1, index, 4)) for index in range(4)],
        )
        for number in range(3)
    }
    os.makedirs(tmp_path / "large")
    write_checkpoint(tmp_path / "large", values)
    with CheckpointReader(tmp_path / "large") as reader:
        cut = rewrite.whole_cut(reader.manifest, 10**9)
        tracemalloc.start()
        rewrite.write_checkpoint(reader, str(tmp_path / "out"), cut)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1.2 * 4 * 256 * 16384


def test_no_space_and_no_checkpoint(capsys, tmp_path, saved, monkeypatch):
    usage = rewrite.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(rewrite.shutil, "disk_usage", lambda path: usage._replace(free=100))
    code, _, error = run(capsys, "merge", saved, tmp_path / "new")
    assert code == 2 and "but its disk has 100 left" in error and not (tmp_path / "new").exists()
    for command in ("inspect", "verify"):
        code, _, error = run(capsys, command, tmp_path / "nothing")
        assert code == 2 and error == f"error: {tmp_path / 'nothing'} does not exist.\n"


@pytest.mark.parametrize("damaged", ["first", "second"])
@pytest.mark.parametrize("kind", ["flip", "truncate", "remove"])
def test_diff_of_a_damaged_checkpoint(capsys, tmp_path, saved, damaged, kind):
    save(tmp_path / "other")
    paths = [tmp_path / name / "iter_0000007" for name in ("run", "other")]
    damage(paths[damaged == "second"] / "state_00000.safetensors", kind)
    code, text, error = run(capsys, "diff", *paths)
    assert code == 1 and "state_00000.safetensors" in text + error


def test_files_as_paths(capsys, tmp_path, saved):
    for name in (MANIFEST_FILE, "state_00000.safetensors"):
        code, text, error = run(capsys, "inspect", os.path.join(saved, "iter_0000007", name))
        assert code == 0 and "iter_0000007: iteration 7" in text, error
    assert run(capsys, "inspect", os.path.join(saved, folders.TRACKER_FILE))[0] == 0
    (tmp_path / "notes").write_text("no checkpoint")
    for command in ("inspect", "verify"):
        code, _, error = run(capsys, command, tmp_path / "notes")
        assert code == 2 and "is a file that belongs to no checkpoint" in error


def test_plain_weights(capsys, tmp_path, saved):
    weights = tmp_path / "weights"
    assert run(capsys, "merge", saved, weights, "--weights-only", "--max-file-size", 1e-5)[0] == 0
    code, text, _ = run(capsys, "inspect", weights)
    assert code == 0 and f"{WORDS} " in text and "bfloat16" in text and f"{20 * 16 * 2:>15,} bytes" in text
    assert "iteration 7" in text and "optimizer: " not in text and "without check sums" in text
    assert run(capsys, "diff", weights, saved, "--weights-only")[0] == 0
    save(tmp_path / "other", change=lambda values: values[PROJECTION].__setitem__(1, values[PROJECTION][1] ^ 1))
    code, text, _ = run(capsys, "diff", tmp_path / "other", weights, "--weights-only")
    assert code == 1 and text.startswith(f"{PROJECTION}: 512 of 512 elements differ")
    assert run(capsys, "verify", weights)[0] == 0
    names = sorted(name for name in os.listdir(weights) if name.endswith(".safetensors"))
    damage(weights / names[0], "truncate")
    for command in (["inspect", weights], ["verify", weights], ["diff", weights, saved]):
        code, text, error = run(capsys, *command)
        assert code == 1 and names[0] in text + error
    (weights / names[0]).unlink()
    assert "is missing" in run(capsys, "inspect", weights)[2]


def test_no_mindspore_is_imported():
    code = "import sys, mindspeed_ms.tools.checkpoint.__main__; sys.exit('mindspore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("merge", "--max-file-size", "nan"),
        ("merge", "--max-file-size", "0"),
        ("diff", "--rtol", "-1"),
        ("diff", "--atol", "nan"),
    ],
)
def test_numbers_are_looked_at(capsys, saved, tmp_path, arguments):
    command, *options = arguments
    with pytest.raises(SystemExit) as ended:
        run(capsys, command, saved, tmp_path / "new", *options)
    assert ended.value.code == 2 and not (tmp_path / "new").exists()


def test_nothing_is_written_into_a_checkpoint(capsys, saved, tmp_path):
    code, _, error = run(capsys, "merge", saved, os.path.join(saved, "iter_0000007"))
    assert code == 2 and "checkpoint itself" in error
    (tmp_path / "file").write_text("")
    code, _, error = run(capsys, "merge", saved, tmp_path / "file")
    assert code == 2 and "is a file" in error


def test_two_jobs_write_one_new_folder(capsys, saved, tmp_path):
    """A living job keeps others out, the later one's result is dropped, what a dead one left is deleted."""
    target = tmp_path / "weights"
    dead = subprocess.run([sys.executable, "-c", LEFT_BEHIND, str(target)], check=False)
    assert dead.returncode == 7 and sorted(os.listdir(tmp_path))[1].startswith("weights.")
    with pytest.raises(CheckpointError, match="was written by another job meanwhile"), new_folder(target) as one:
        assert sorted(os.listdir(tmp_path)) == ["run", os.path.basename(one)]
        code, _, error = run(capsys, "merge", saved, target, "--weights-only")
        assert code == 2 and f"another job writes {target}: process {os.getpid()}" in error and error.count("\n") == 1
        target.mkdir()
        (target / "other").write_text("kept")
    assert sorted(os.listdir(tmp_path)) == ["run", "weights"] and os.listdir(target) == ["other"]


LEFT_BEHIND = """
import os, sys
from mindspeed_ms.core.dist_checkpointing.new_folder import new_folder
with new_folder(sys.argv[1]):
    os._exit(7)
"""


def test_two_jobs_reshard_into_one_folder(capsys, saved, tmp_path, monkeypatch):
    """One that passed the first look while the other one was writing finds the result when it has the lock."""
    target = tmp_path / "target"
    assert run(capsys, "merge", saved, target)[0] == 0
    before = (target / "iter_0000007" / MANIFEST_FILE).read_bytes()
    has = iter((False, True))
    monkeypatch.setattr(folders, "has_checkpoints", lambda _folder: next(has))
    monkeypatch.setattr("mindspeed_ms.tools.checkpoint.rewrite._is_left_behind", lambda _name: True)
    code, _, error = run(capsys, "merge", saved, target)
    assert code == 2 and "holds checkpoints already" in error
    assert (target / "iter_0000007" / MANIFEST_FILE).read_bytes() == before and len(os.listdir(target)) == 2


@pytest.mark.parametrize("command", ["merge", "verify"])
def test_a_source_that_a_training_deletes_meanwhile(capsys, saved, tmp_path, monkeypatch, command):
    """It is not called damaged."""
    find = CheckpointReader.incomplete

    def replaced(reader):
        os.rename(reader.folder, tmp_path / "old")
        (tmp_path / "old" / "state_00000.safetensors").unlink()
        os.mkdir(reader.folder)
        return find(reader)

    reader, manifest = CheckpointReader(os.path.join(saved, "iter_0000007")), folders.newest_manifest
    monkeypatch.setattr(folders, "newest_manifest", lambda *arguments: (reader.folder, manifest(*arguments)[1]))
    monkeypatch.setattr("mindspeed_ms.tools.checkpoint.verify.check_sums", replaced)
    target = [tmp_path / "new"] if command == "merge" else []
    code, text, error = run(capsys, command, saved, *target)
    assert code and "was deleted or replaced while it was read" in text + error and not (tmp_path / "new").exists()


def test_a_run_that_moves_on_is_looked_at_again(saved, tmp_path, monkeypatch):
    lists = iter(([os.path.join(saved, "iter_0000005")], *[[os.path.join(saved, "iter_0000007")]] * 2))
    monkeypatch.setattr(folders, "candidates", lambda _folder: next(lists))
    assert folders.newest_manifest(saved)[0].endswith("iter_0000007")


def test_a_reader_that_has_enough_is_no_error(tmp_path):
    save(tmp_path)
    command = f"{sys.executable} -m mindspeed_ms.tools.checkpoint inspect {tmp_path} | true; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("141\n", "")
