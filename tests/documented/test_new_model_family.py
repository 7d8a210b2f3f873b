"""docs/new-model-family.md: its module makes a family whose models go to our format and back."""

import re

from tests.conversion.test_hugging_face import convert, read_tensors
from tests.conversion.tiny_models import read_json, write_folder
from tests.documented.pages import ROOT

CONFIG = {
    "model_type": "tower",
    "vocab_size": 64,
    "hidden_size": 32,
    "floor_width": 48,
    "floors": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "its_own": True,
}


def test_the_module_of_the_page_is_a_family(tmp_path, monkeypatch):
    from mindspeed_ms.models.families import family

    monkeypatch.setattr(family, "_FAMILIES", dict(family._FAMILIES))  # no later test sees it
    page = (ROOT / "docs" / "new-model-family.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(code, "tower.py", "exec"), {})
    source, tensors = write_folder(tmp_path / "model", CONFIG)
    assert tensors["tower.floors.1.down.weight"].shape == (48, 32) and "head.weight" not in tensors
    words = ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2", "--verify")
    native = convert(source, tmp_path / "native", "--save-model-type", "native", *words)
    back = convert(native, tmp_path / "back", "--save-model-type", "hf", "--verify")
    assert read_tensors(back) == read_tensors(source) and read_json(back) == CONFIG
