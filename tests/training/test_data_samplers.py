"""Samplers: order by seed and pass, the set that is too small by name."""

import pytest

from mindspeed_ms.core.datasets.errors import DatasetError
from tests.training import tiny


def orders(folder):
    """Sample indices of two passes of a cyclic loader, by random_seed."""
    from mindspeed_ms.training.data import build_pretraining_data_loader
    from mindspeed_ms.training.utils import set_parallel_context

    found = {}
    for seed in (1, 2, 1):
        all_config = tiny.make_config(folder, training={"seed": seed}, dataset={"dataloader_type": "cyclic"})
        set_parallel_context(all_config.parallel_config)
        sampler = build_pretraining_data_loader(tiny.Samples(40), 0, all_config).sampler
        indices = [index for _ in range(40) for index in sampler.next_indices()]
        assert found.setdefault(seed, indices) == indices
    texts = []
    for name in ("training data", "validation data"):
        with pytest.raises(DatasetError) as caught:
            build_pretraining_data_loader(tiny.Samples(1), 0, all_config, name)
        texts.append(str(caught.value))
    return found, texts


def test_the_seed_decides_the_order_and_the_set_is_named(world, tmp_path):
    ((found, texts),) = world(1)(orders, tmp_path)
    for indices in found.values():
        assert sorted(indices[:40]) == sorted(indices[40:]) == list(range(40)) and indices[:40] != indices[40:]
    assert found[1] != found[2]
    assert texts[0].startswith("the training data has 1 samples, fewer than micro batch size 2") and "--eval" not in texts[0]
    assert texts[1].startswith("the validation data has 1 samples") and "--eval-iters 0 evaluates nothing" in texts[1]


def positions(folder):
    """Validation samples after a resume with three evaluations behind it, and after new data."""
    from mindspeed_ms.training.data import build_data, init_batch_sizes
    from mindspeed_ms.training.utils import set_parallel_context

    all_config = tiny.make_config(folder)
    set_parallel_context(all_config.parallel_config)
    init_batch_sizes(all_config)

    def data():
        return build_data(all_config, None, (tiny.Samples(40), tiny.Samples(40), None))

    resumed, anew = data(), data()
    resumed.go_to(resumed.positions(), {"train": 8, "valid": 12})
    anew.start_anew({"train": 8, "valid": 12})
    later = data()
    later.go_to(anew.positions(), {"train": 12, "valid": 14})
    parts = [(part.train.stream, part.valid.stream) for part in (resumed, anew, later)]
    return [tuple(stream.loader.sampler.next_indices()[0] for stream in pair) for pair in parts]


def test_evaluations_are_counted_where_a_training_continues(world, tmp_path):
    assert world(1)(positions, tmp_path) == [[(8, 12), (0, 0), (4, 2)]]
