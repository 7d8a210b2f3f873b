"""The folder of data recorded from Megatron-LM core_v0.12.1, for tests that compare with all of it."""

import pytest

from mindspeed_ms.testing.parity.recordings import golden_folder


def data_folder():
    """Path of the recordings; skips the test where they are not present."""
    folder = golden_folder()
    if folder is None:
        pytest.skip("the recordings of Megatron's data are not beside this checkout")
    return folder / "data"
