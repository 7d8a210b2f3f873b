"""Generation and scores of mixtures of experts: the same tokens in every layout, and on every rank."""

import numpy as np
import pytest

from tests.conversion.tiny_models import CONFIGS, tensors_of, write_folder

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
PROMPTS = [np.random.RandomState(5).randint(4, 64, length).tolist() for length in (1, 6, 17)]
LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "tp2ep2": (2, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "tp2ep2 of cut experts": (4, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    "pp2ep2": (4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    "ep4": (4, {"expert_model_parallel_size": 4}),
}


def write_model(folder, name, seed=1):
    """A folder of a random model, whose tokens are not all alike."""
    config = {**CONFIGS[name], "eos_token_id": 3, "bos_token_id": 0}
    tensors = {key: array * (1 if "norm" in key else 3) for key, array in tensors_of(config, seed).items()}
    return write_folder(folder, config, tensors)[0]


def generated(folders, sizes):
    """{family: (greedy ids of each prompt, their scores, bytes of the cache)} on this rank."""
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.inference.engine import Engine
    from mindspeed_ms.inference.loading import load
    from mindspeed_ms.inference.sampling import SamplingParams

    result = {}
    for name, folder in folders.items():
        loaded = load(folder, slots=4, max_sequence_length=40, dtype="float32", prefill_chunk=5, **sizes)
        params = SamplingParams(max_new_tokens=8, temperature=0)
        answers = Engine(loaded.runner, None, loaded.eos_ids).generate(PROMPTS, params)
        scores = [one.log_probabilities for one in loaded.runner.score(PROMPTS)]
        result[name] = [list(answer.token_ids) for answer in answers], scores, loaded.runner.cache.bytes
        parallel_state.destroy_model_parallel()
    return result


@pytest.fixture(scope="module")
def models(world, tmp_path_factory):
    """(folders, what one rank generates)."""
    root = tmp_path_factory.mktemp("experts")
    folders = {name: write_model(root / name, name) for name in FAMILIES}
    return folders, world(1)(generated, folders, {})[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same(world, models, layout):
    folders, expected = models
    size, sizes = LAYOUTS[layout]
    for rank in world(size)(generated, folders, sizes):
        for name, (ids, scores, _) in expected.items():
            assert rank[name][0] == ids, name
            for found, right in zip(rank[name][1], scores, strict=True):
                np.testing.assert_allclose(found, right, atol=2e-5, err_msg=name)


def test_the_cache_of_compressed_keys(models):
    """Layers x (kv_lora_rank + qk_rope_head_dim) x slots x tokens x 4 bytes; else both, of each group."""
    sizes = {name: found[2] for name, found in models[1].items()}
    assert sizes["deepseek_v3"] == 4 * (12 + 6) * 4 * 40 * 4
    assert sizes["mixtral"] == 4 * 2 * 2 * 8 * 4 * 40 * 4


def refused(folder):
    from mindspeed_ms.inference.loading import load

    with pytest.raises(ValueError, match=r"2 ranks were started, .* with expert_model_parallel_size 4 is 4"):
        load(folder, expert_model_parallel_size=4)


def test_the_number_of_ranks_is_that_of_the_experts(world, models):
    world(2)(refused, models[0]["mixtral"])


def test_layers_of_multi_token_prediction_are_left_out(world, tmp_path):
    """The same tokens and scores as without them, whether the cache is used or not (scores are computed at once)."""
    config = {**CONFIGS["deepseek_v3_further"], "eos_token_id": 3, "bos_token_id": 0}
    tensors = {key: array * (1 if "norm" in key else 3) for key, array in tensors_of(config, 1).items()}
    own = {key: array for key, array in tensors.items() if not key.startswith(("model.layers.4.", "model.layers.5."))}
    folders = {
        "with": write_folder(tmp_path / "with", config, tensors)[0],
        "without": write_folder(tmp_path / "own", config, own)[0],
    }
    for sizes in ({}, {"pipeline_model_parallel_size": 2}):
        for rank in world(2 if sizes else 1)(generated, folders, sizes):
            assert rank["with"][0] == rank["without"][0] and rank["with"][2] == rank["without"][2]
            for found, right in zip(rank["with"][1], rank["without"][1], strict=True):
                np.testing.assert_array_equal(found, right)
