"""Families of Hugging Face models: a folder that we wrote, by transformers, against GPTModel from the first folder: logits
within 1e-4 (needs the `[peer]` extra); quantised weights, by transformers' formulas."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_ms.models.hugging_face.stored_form import fp8_values, in_dtype, mxfp4_values
from mindspeed_ms.tools.converter.__main__ import main
from tests.conversion.test_loading import load
from tests.conversion.tiny_models import CONFIGS, write_folder
from tests.model import builders

pytestmark = pytest.mark.peer


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Folders of the models, and what transformers computes from the ones that went to our format and back."""
    root = tmp_path_factory.mktemp("families")
    folders, written = {}, {}
    for name in CONFIGS:
        folders[name], _ = write_folder(root / name, CONFIGS[name])
        native, written[name] = str(root / f"{name}_native"), str(root / f"{name}_back")
        assert main(["--load-dir", folders[name], "--save-dir", native, "--save-model-type", "native"]) == 0
        assert main(["--load-dir", native, "--save-dir", written[name], "--save-model-type", "hf"]) == 0
    config = builders.make_config(builders.LLAMA | {"vocab_size": 64, "hidden_size": 32})
    tokens = builders.batch(config, batch_size=2, length=32)["tokens"].asnumpy().tolist()
    (root / "question.json").write_text(json.dumps({"folders": written, "tokens": tokens}))
    reference = Path(__file__).with_name("transformers_logits.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(reference), str(root / "question.json"), str(root / "answer.npz")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folders, np.load(root / "answer.npz")


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(world, references, name):
    folders, logits = references
    ((_, ours),) = world(1)(load, folders[name], ())
    ours = ours.reshape(logits[name].shape) if ours.shape[0] == 2 else ours.swapaxes(0, 1)
    np.testing.assert_allclose(ours, logits[name], atol=1e-4)


def test_quantised_weights(tmp_path):
    """MXFP4 and FP8 numbers, all of them, in bfloat16."""
    random = np.random.RandomState(0)
    blocks = random.randint(0, 256, (3, 8, 4, 16)).astype(np.uint8)
    scales = random.randint(100, 140, (3, 8, 4)).astype(np.uint8)
    weight = random.choice([byte for byte in range(256) if byte & 127 != 127], (256, 384)).astype(np.uint8)
    factors = random.uniform(1e-4, 1e-2, (2, 3)).astype(np.float32)
    np.savez(tmp_path / "question.npz", blocks=blocks, scales=scales, weight=weight, scale_inv=factors)
    script = Path(__file__).with_name("transformers_quantized.py")
    command = [sys.executable, str(script), str(tmp_path / "question.npz"), str(tmp_path / "answer.npz")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "answer.npz") as answer:
        found = np.stack([in_dtype(mxfp4_values(*expert), "bfloat16").T for expert in zip(blocks, scales)])
        np.testing.assert_array_equal(found, answer["mxfp4"])
        np.testing.assert_array_equal(in_dtype(fp8_values(weight, factors, (128, 128)), "bfloat16"), answer["fp8"])
