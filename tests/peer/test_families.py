"""Families of Hugging Face models: a folder that we wrote, by transformers, against GPTModel from the first folder: logits
within 1e-4 (needs the `[peer]` extra). Mixtures of experts are compared once they run here."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_ms.tools.converter.__main__ import main
from tests.conversion.test_loading import load
from tests.conversion.tiny_models import CONFIGS, DENSE, write_folder
from tests.model import builders

pytestmark = pytest.mark.peer


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Folders of the models, and what transformers computes from the ones that went to our format and back."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs the [peer] extra")
    root = tmp_path_factory.mktemp("families")
    folders, written = {}, {}
    for name in DENSE:
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


@pytest.mark.parametrize("name", DENSE)
def test_logits_are_those_of_transformers(world, references, name):
    folders, logits = references
    ((_, ours),) = world(1)(load, folders[name], ())
    ours = ours.reshape(logits[name].shape) if ours.shape[0] == 2 else ours.swapaxes(0, 1)
    np.testing.assert_allclose(ours, logits[name], atol=1e-4)
