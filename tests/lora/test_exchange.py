"""Adapters on Hugging Face bases: trained, merged and taken out again, as PEFT folders, in inference."""

import json

import numpy as np
import pytest

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.folders import newest_manifest
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.models import peft_folder
from mindspeed_ms.models.adapter_files import model_of, read_adapters
from mindspeed_ms.models.adapters import merged
from mindspeed_ms.models.families.family import families
from mindspeed_ms.models.peft_folder import CONFIG_FILE, WEIGHTS_FILE
from mindspeed_ms.testing import checkpoint_runs as runs
from mindspeed_ms.tools.lora import main
from tests.conversion.tiny_models import CONFIGS, write_folder
from tests.lora.test_layouts import LORA

IDS = [0, 5, 17, 3, 60, 2]


def trained(folder, base):
    """Adapters alone, trained a few steps on a Hugging Face folder, with settings of one cell of its own; the logits."""
    from mindspore import Tensor

    special = {"cell": "language_model.encoder.layers.1.attention.out_proj", "rank": 2, "alpha": 5}

    def look(run):
        model = run.model[0].module
        model.set_train(False)
        return model(Tensor(np.array([IDS], np.int32))).asnumpy()[0, -1]

    return runs.train(
        folder,
        look=look,
        training={"load_checkpoint": base, "use_checkpoint_args": True},
        lora={**LORA, "target_cells": [*LORA["target_cells"], special], "lora_ckpt_filter": True},
        optimizer={"learning_rate": 0.05},
    )["look"]


def logits(checkpoint, adapter=None, **arguments):
    """Logits after IDS by a runner."""
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.inference.loading import load
    from mindspeed_ms.inference.model_runner import Feed

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return load(checkpoint, adapter=adapter, max_sequence_length=16, slots=2, **arguments).runner.forward([Feed(0, 0, IDS)])[0]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folders(request, world, tmp_path_factory):
    """(base, folder of adapters alone, logits of the trained model)."""
    folder = tmp_path_factory.mktemp(request.param)
    base, _ = write_folder(folder / "base", CONFIGS[request.param])
    return base, str(folder / "adapters"), world(1)(trained, str(folder / "adapters"), base)[0]


def test_merged_and_taken_out(world, folders, tmp_path, capsys):
    base, adapters, expected = folders
    merged, back = str(tmp_path / "merged"), str(tmp_path / "back")
    assert main(["merge", adapters, merged, "--save-model-type", "hf", "--verify"]) == 0, capsys.readouterr().err
    assert main(["unmerge", merged, back, "--adapter", adapters]) == 0, capsys.readouterr().err
    for found in (world(1)(logits, merged)[0], world(2)(logits, base, adapters, tensor_model_parallel_size=2)[0]):
        np.testing.assert_allclose(found.reshape(-1)[: expected.size], expected, atol=1e-5)
    place, manifest = newest_manifest(back)
    with CheckpointReader(base, newest_manifest(base)[1]) as one, CheckpointReader(place, manifest) as other:
        for key in one.manifest.tensors:
            np.testing.assert_allclose(other.read_whole(key), one.read_whole(key), atol=1e-6, err_msg=key)


def test_peft_folders_go_out_and_in(folders, tmp_path, capsys):
    base, adapters, _ = folders
    out, again = str(tmp_path / "peft"), str(tmp_path / "again")
    assert main(["export", adapters, out]) == 0, capsys.readouterr().err
    assert main(["import", out, again, "--base", base]) == 0, capsys.readouterr().err
    for words in (["export", adapters, out], ["import", out, again, "--base", base]):
        assert main(words) and f"{words[2]} exists already: choose a new or empty folder" in capsys.readouterr().err
    first, second = (read_adapters(path, None) for path in (adapters, again))
    assert set(first.tensors) == set(second.tensors)
    for key, values in first.tensors.items():
        np.testing.assert_array_equal(values, second.tensors[key], err_msg=key)
    assert [first.scale(cell) for cell in first.cells] == pytest.approx([second.scale(cell) for cell in first.cells])
    with open(f"{base}/config.json", encoding="utf-8") as one, open(f"{out}/{CONFIG_FILE}", encoding="utf-8") as other:
        assert json.load(other)["fan_in_fan_out"] == (json.load(one)["model_type"] == "gpt2")
    assert main(["inspect", again]) == 0
    assert "layers.1.attention.out_proj  rank 2  scale 2.5" in capsys.readouterr().out


def test_modules_with_an_a_of_their_own_are_joined(tmp_path):
    base, _ = write_folder(tmp_path / "base", CONFIGS["llama3"])
    place, manifest = newest_manifest(base)
    model = model_of(manifest, place)
    from mindspeed_ms.core.dist_checkpointing.shard_file import Entry, write_shard

    random, tensors = np.random.default_rng(0), {}
    sizes = {"q_proj": 64, "v_proj": 32}
    for name, out in sizes.items():
        module = f"base_model.model.model.layers.2.self_attn.{name}"
        tensors[f"{module}.lora_A.weight"] = random.standard_normal((4, 32)).astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = random.standard_normal((out, 4)).astype(np.float32)
    entries = []
    for name, values in tensors.items():
        if "v_proj" in name:  # in bfloat16
            values.view(np.uint16)[..., ::2] = 0
            bits = np.ascontiguousarray(values.view(np.uint16)[..., 1::2])
            entries.append(Entry(name, "bfloat16", values.shape, bits.nbytes, bits.reshape(-1).view(np.uint8)))
        else:
            entries.append(Entry(name, "float32", values.shape, values.nbytes, values.reshape(-1).view(np.uint8)))
    folder = tmp_path / "peft"
    folder.mkdir()
    write_shard(str(folder / WEIGHTS_FILE), entries, made_by="pt")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "alpha_pattern": {"v_proj": 2}}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    adapters = read_adapters(str(folder), lambda: model)
    cell = "language_model.encoder.layers.2.attention.qkv_proj"
    assert adapters.cells == [cell] and adapters.tensors[f"{cell}.lora_a"].shape == (8, 32)
    delta = adapters.delta(cell).reshape(2, 4, 16, 32)  # per group two queries, key, value
    start = "base_model.model.model.layers.2.self_attn."
    q, v = (tensors[f"{start}{name}.lora_B.weight"] @ tensors[f"{start}{name}.lora_A.weight"] for name in ("q_proj", "v_proj"))
    np.testing.assert_allclose(delta[:, :2].reshape(64, 32), 2.0 * q, atol=1e-5)
    np.testing.assert_allclose(delta[:, 3].reshape(32, 32), 0.5 * v, atol=1e-5)
    assert not delta[:, 2].any()
    (folder / CONFIG_FILE).write_text(json.dumps({**config, "use_rslora": True}))
    stabilized = read_adapters(str(folder), lambda: model)
    np.testing.assert_allclose(stabilized.delta(cell), 2.0 * adapters.delta(cell), atol=1e-5)
    peft_folder.write(str(tmp_path / "again"), stabilized, families()["llama"], model)
    again = read_adapters(str(tmp_path / "again"), lambda: model)
    np.testing.assert_allclose(again.delta(cell), stabilized.delta(cell), atol=1e-5)
    assert json.loads((tmp_path / "again" / CONFIG_FILE).read_text())["layers_to_transform"] == [2]
    for change, words in (
        ({"use_dora": True}, "use_dora is True: expected False"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ):
        (folder / CONFIG_FILE).write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=words):
            read_adapters(str(folder), lambda: model)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    other, _ = write_folder(tmp_path / "other", CONFIGS["llama"])
    with pytest.raises(CheckpointError, match=r"another base: .*is for 32 inputs and 64 outputs, the base has 32 and 32"):
        read_adapters(str(folder), lambda: model_of(newest_manifest(other)[1], other))


def test_merged_weights_are_rounded_to_the_nearest():
    """In bfloat16, which 1 + n / 128 is; the middle between two goes to the even one."""
    sums = 1.0 + np.array([0.0, 0.49, 0.5, 0.51, 1.49, 1.5, 1.51]) / 128
    found = merged(np.full(7, 0x3F80, np.uint16), "bfloat16", (sums - 1.0).astype(np.float32))
    assert (found - 0x3F80).tolist() == [0, 0, 0, 1, 1, 2, 2]
