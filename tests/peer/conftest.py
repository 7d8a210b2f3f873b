"""Nothing here runs without the whole extra `[peer]`: one condition and one reason, which `.ci/run` knows."""

import importlib.util
from pathlib import Path

import pytest

PEERS = ("torch", "megatron", "transformers", "peft")


def pytest_collection_modifyitems(items):
    """Skip the tests of this folder when one of the peers is not installed."""
    if not all(map(importlib.util.find_spec, PEERS)):
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs the [peer] extra"))
