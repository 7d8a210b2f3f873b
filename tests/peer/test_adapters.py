"""Adapters against PEFT: ours in PEFT, PEFT's here; logits within 1e-5 of the largest (needs the `[peer]` extra)."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_ms.tools.lora import main
from tests.conversion.tiny_models import CONFIGS, write_folder
from tests.lora.test_exchange import logits, trained

pytestmark = pytest.mark.peer


@pytest.mark.parametrize("name", ["llama3", "qwen2", "gpt2"])
def test_adapters_are_exchanged_with_peft(world, name, tmp_path):
    config = {**CONFIGS[name], "architectures": None}
    base, _ = write_folder(tmp_path / "base", {key: value for key, value in config.items() if value is not None})
    adapters, peft, made = (str(tmp_path / one) for one in ("adapters", "peft", "made"))
    expected = world(1)(trained, adapters, base)[0]
    assert main(["export", adapters, peft]) == 0
    script = Path(__file__).with_name("peft_adapters.py")
    subprocess.run([sys.executable, str(script), base, peft, made, str(tmp_path / "out.npz")], check=True)
    out = np.load(tmp_path / "out.npz")
    assert np.abs(out["ours"] - out["plain"]).max() > 1e-3
    for one, other in ((expected, out["ours"]), (world(1)(logits, base, made)[0].reshape(-1), out["theirs"])):
        assert np.abs(one[: other.size] - other).max() < 1e-5 * np.abs(other).max()
    (plain,) = world(1)(logits, base)
    assert np.abs(plain.reshape(-1)[: out["plain"].size] - out["theirs"]).max() > 1e-3
