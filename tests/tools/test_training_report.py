"""Closing text of a training: the same in every layout, through the cache or without it."""

from types import SimpleNamespace

import pytest

from mindspeed_ms.core.datasets.tokenizer.null import NullTokenizer
from mindspeed_ms.testing.small_trainings import UNTIED, build, make_config

LAYOUTS = {
    "tp2": ({"tensor_model_parallel_size": 2}, {}, False),
    "tp2 sp": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}, True),
    "pp2": ({"pipeline_model_parallel_size": 2}, {}, False),
    "pp2 vpp2": ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, {}, False),
    "dp2": ({}, {}, False),
    "ring": ({"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"}, {}, True),
    "ulysses": ({"context_parallel_size": 2}, {}, True),
    "zero 3": ({"zero_level": "z3"}, {}, False),
    "band": ({}, {"fa_config": {"pre_tokens": 100, "next_tokens": 0}}, True),
}


def sample(parallel, fields):
    """(text of a model after its build, whether the cache was left out) on each rank."""
    from mindspeed_ms.tools import training_report

    all_config = make_config({**UNTIED, **fields}, parallel)
    model, _, _ = build(all_config)
    run = SimpleNamespace(model=model, all_config=all_config)
    corpus = SimpleNamespace(tokenizer=NullTokenizer(63), end_of_document=63, vocab_size=64)
    texts = [training_report.write_sample(run, corpus, prompt, 9) for prompt in ("1 2 3", "", " ".join(["5"] * 40))]
    return texts, training_report._needs_whole_sequences(run)


@pytest.fixture(scope="module")
def alone(world):
    return world(1)(sample, {}, {})[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_closing_text(world, alone, name):
    parallel, fields, is_whole = LAYOUTS[name]
    texts, without_cache = alone
    assert not without_cache and all(len(text.split()) >= 9 for text in texts)
    for found, whole in world(1 if name == "band" else 2)(sample, parallel, fields):
        assert found == texts
        assert whole == is_whole
