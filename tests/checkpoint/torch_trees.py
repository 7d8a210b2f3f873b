"""Comparison of object trees of torch.save files."""

import argparse
import collections
import io

import numpy as np

from mindspeed_ms.core.dist_checkpointing.torch_file import Opaque, TensorReference


def assert_same(found, expected, place=""):
    """Compare two trees: types, values, order of items, and all about tensors but where they are."""
    assert type(found) is type(expected), place
    if isinstance(found, TensorReference):
        for name in ("dtype", "shape", "stride", "offset", "parameter", "requires_grad"):
            assert getattr(found, name) == getattr(expected, name), place
        assert found.read().tobytes() == expected.read().tobytes(), place
        assert_same(found.attributes, expected.attributes, place)
    elif isinstance(found, dict):
        keys = [list(map(_shown_key, value)) for value in (found, expected)]
        assert keys[0] == keys[1], place
        for key, one, other in zip(found, found.values(), expected.values()):
            assert_same(one, other, f"{place}.{key}")
        if isinstance(found, collections.defaultdict):
            assert found.default_factory is expected.default_factory
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected), place
        for number, (one, other) in enumerate(zip(found, expected)):
            assert_same(one, other, f"{place}.{number}")
    elif isinstance(found, Opaque | argparse.Namespace):
        assert_same(vars(found), vars(expected), place)
    elif isinstance(found, np.ndarray):
        assert found.dtype == expected.dtype and np.array_equal(found, expected), place
    elif isinstance(found, io.BytesIO):
        assert (found.getvalue(), found.tell()) == (expected.getvalue(), expected.tell()), place
    else:
        assert found == expected or found != found, place


def _shown_key(key):
    return (key.name, key.state) if isinstance(key, Opaque) else key
