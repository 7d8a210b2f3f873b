"""The example of docs/new-option.md gives what the page says: a key, flags, a line of the pages, a property of the schema."""

import os
import re
import textwrap

import pytest

from mindspeed_ms.config import ConfigError
from mindspeed_ms.config.docs import row_line
from mindspeed_ms.config.json_schema import section_schema
from mindspeed_ms.config.row import rows_of
from mindspeed_ms.config.sections import base, field
from mindspeed_ms.config.values import PositiveInt
from tests.config.test_commands import ROOT


def test_the_example_gives_what_the_page_says():
    with open(os.path.join(ROOT, "docs", "new-option.md"), encoding="utf-8") as file:
        page = file.read()
    code, line = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL).group(1) for kind in ("python", "text"))
    names = {"Section": base.Section, "field": field.field, "PositiveInt": PositiveInt}
    exec("class Example(Section):\n    config_name = 'training_config'\n" + textwrap.indent(code, "    "), names)
    (row,) = rows_of(names["Example"])
    assert row_line(row, "en") == line.strip() and row.help_zh in row_line(row, "zh")
    assert all(f"`{word}`" in page for word in (*row.flags, row.path))
    assert row.all_names == ("log_weight_norms_interval", "weight_norms_interval")
    assert (row.guide_default, row.megatron_default, row.seen) == (None, 100, "log")
    entry = section_schema(names["Example"], {})["properties"][row.name]
    assert entry["description"] == f"{row.help_en} {row.help_zh}" and {"type": "null"} in entry["anyOf"]
    with pytest.raises(ConfigError, match=r"log_weight_norms_interval = 0: expects an integer > 0 or null"):
        names["Example"](log_weight_norms_interval=0)
