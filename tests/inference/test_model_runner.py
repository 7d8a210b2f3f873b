"""ModelRunner: cached = uncached logits in every layout, scores, memory, launched operators, refused feeds."""

from unittest import mock
from unittest.mock import patch

import numpy as np
import pytest

from tests.inference import models
from tests.inference.models import FAMILIES, HALF, SEQUENCES, TOKENS

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp2vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "tp2pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}
HALVES = {f"{name}-bf16": {**FAMILIES[name], **HALF} for name in ("llama", "mistral")}
TOLERANCE = {"": 1e-5, "-bf16": 0.06}
"""Largest difference relative to the largest logit: bfloat16 has 8 bits, and products of other shapes round elsewhere."""


@pytest.fixture(scope="module")
def references(world):
    return world(1)(models.in_turn, {**FAMILIES, **HALVES}, models.uncached)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cached_logits_are_the_uncached_ones(world, references, layout):
    size, parallel = LAYOUTS[layout]
    ranks = world(size)(models.in_turn, {**FAMILIES, **HALVES}, models.cached, parallel)
    assert {pair for name in FAMILIES for pair in ranks[0][name]} == {
        (number, position) for number, cuts in enumerate(models.CUTS) for position in np.cumsum(cuts) - 1
    }
    for name, expected in references.items():
        limit = TOLERANCE["-bf16" if name.endswith("-bf16") else ""] * np.abs(expected).max()
        for (number, position), logits in ranks[0][name].items():
            assert logits.shape == (TOKENS,)
            assert logits.dtype == np.float32
            difference = np.abs(logits - expected[number, position]).max()
            assert difference < limit, f"{name}, sequence {number}, position {position}: {difference}"
        for rank in ranks[1:]:
            assert all(np.array_equal(rank[name][place], logits) for place, logits in ranks[0][name].items()), name


def scores(fields, parallel):
    """Scores of the sequences and of a single token, once whole and once from a position on."""
    runner = models.runner_of(fields, parallel)
    sequences = [*SEQUENCES, SEQUENCES[0][:1], SEQUENCES[1][:9]]
    pairs = zip(runner.score(sequences), runner.score(sequences, [0, 1, 7, 1, 5]))
    return [[(one.log_probabilities, one.is_greedy) for one in pair] for pair in pairs]


@pytest.mark.parametrize("layout", ["one", "tp2pp2", "pp2vpp2"])
def test_scores_are_those_of_the_cut_vocabulary(world, references, layout):
    size, parallel = LAYOUTS[layout]
    families = {name: FAMILIES[name] for name in ("gpt2", "mistral")}
    for rank in world(size)(models.in_turn, families, scores, parallel):
        for name, found in rank.items():
            logits = references[name].astype(np.float64)
            wide = logits - logits.max(-1, keepdims=True)
            expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
            for number, length, first in ((0, 21, 1), (1, 21, 1), (2, 21, 7), (0, 1, 1), (1, 9, 5)):
                ids = np.array(SEQUENCES[number][:length])
                wanted = expected[number, np.arange(length - 1), ids[1:]]
                (whole, greedy), (part, part_greedy) = found.pop(0)
                assert whole.shape == part_greedy.shape[:0] + (length - 1,)
                assert np.allclose(whole, wanted, atol=2e-5)
                assert np.array_equal(greedy, expected[number, : length - 1].argmax(-1) == ids[1:])
                assert np.allclose(part, whole[first - 1 :], atol=2e-5)
                assert np.array_equal(part_greedy, greedy[first - 1 :])


def cache_bytes(fields, parallel):
    """(bytes by the formula, bytes of the tensors, capacities) on this rank."""
    runner = models.runner_of(fields, parallel)
    held = [tensor for layer in runner.cache.capacities for tensor in runner.cache.of_layer(layer)]
    tensors = [tensor for tensor in held if tensor is not None]
    return runner.cache.bytes, sum(tensor.nbytes for tensor in tensors), list(runner.cache.capacities.values())


def test_memory_of_the_cache_is_its_formula(world):
    fields = {"llama": FAMILIES["llama"], "half": {**FAMILIES["llama"], **HALF}, "mixed": FAMILIES["mixed"]}
    fields["latent"] = FAMILIES["latent"]
    (one,) = world(1)(models.in_turn, fields, cache_bytes, {})
    slots, groups, head, longest, ring = 4, 2, 16, 32, 6 - 1 + models.CHUNK
    assert one["llama"] == (2 * 4 * groups * head * longest * slots * 4,) * 2 + ([longest] * 4,)
    assert one["half"][:2] == (2 * 4 * groups * head * longest * slots * 2,) * 2
    assert one["mixed"] == (2 * groups * head * 2 * (longest + ring) * slots * 4,) * 2 + ([ring, longest] * 2,)
    assert one["latent"][:2] == (4 * (16 + 8) * longest * slots * 4,) * 2
    for rank in world(4)(models.in_turn, fields, cache_bytes, LAYOUTS["tp2pp2"][1]):
        assert rank["llama"][:2] == (one["llama"][0] // 4,) * 2
        assert rank["latent"][:2] == (one["latent"][0] // 2,) * 2  # the same on both tensor-parallel ranks


def launches(fields):
    """Operators that one layer launches in a decode step, by name."""
    from mindspeed_ms import ops
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.inference.model_runner import Feed

    forms, counts = ops.current_forms(), []
    for layers in (1, 2):
        parallel_state.destroy_model_parallel()
        runner = models.runner_of({**fields, "num_layers": layers, "window_attn_skip_freq": None})
        runner.forward([Feed(0, 0, [1, 2, 3]), Feed(1, 0, [4])])
        count = {}

        def counted(name, form, count=count):
            def call(*arguments, **keywords):
                result = form(*arguments, **keywords)
                if name != "cast" or result is not arguments[0]:
                    count[name] = count.get(name, 0) + 1
                return result

            return call

        with mock.patch.dict(forms, {name: counted(name, form) for name, form in forms.items()}):
            runner.forward([Feed(0, 3, [5]), Feed(1, 1, [6])])
        counts.append(count)
    return {name: number - counts[0].get(name, 0) for name, number in counts[1].items()}


def test_a_layer_launches_few_operators_per_step(world):
    (found,) = world(1)(models.in_turn, FAMILIES, launches)
    totals = {name: sum(counts.values()) for name, counts in found.items()}
    latent = {"latent": 18, "latent_window": 16}  # two products with the weights of the heads, two joins, norms
    expected = {"gpt2": 11, "llama": 9, "qwen2": 9, "qwen3": 13, "mistral": 9, **latent, "sinks": 9, "mixed": 9}
    assert totals == expected, found
    linears = {name: counts["linear_forward"] for name, counts in found.items()}
    assert linears == {**dict.fromkeys(linears, 4), "latent": 6, "latent_window": 5}
    assert all(counts["cached_attention"] == 1 for counts in found.values())


def hooked(fields):
    """(logits of a decode step, the same with hooks on layers and norms, shapes that the hooks saw)."""
    from mindspeed_ms.inference.model_runner import Feed

    runner, seen = models.runner_of(fields), []

    def logits():
        return runner.forward([Feed(0, 0, [1, 2, 3])])[0]

    before = logits()
    block = runner._chunks[0].language_model.encoder
    for cell in (block.layers[0], block.layers[1].input_norm, block.layers[1].post_attention_norm, block.final_norm):
        cell.register_forward_pre_hook(lambda cell, inputs: seen.append(inputs[0].shape))
        cell.register_forward_hook(lambda cell, inputs, output: seen.append(output.shape))
    return before, logits(), seen


def test_hooks_see_tensors_of_hidden_states(world):
    """Norms add the sums before them in one operator, which hooks would not see."""
    before, after, seen = world(1)(hooked, FAMILIES["llama"])[0]
    assert seen == [(3, 1, 64)] * 8
    np.testing.assert_allclose(before, after, atol=1e-6)


def growth(fields):
    """Bytes of the C heap and blocks of Python objects by which a decode step grows this process: medians."""
    from mindspeed_ms.inference.model_runner import Feed
    from mindspeed_ms.testing.memory import held_memory

    runner = models.runner_of(fields, max_sequence_length=1100)
    held = []
    for step in range(1000):  # Python's own lists of free objects settle within some hundreds
        runner.forward([Feed(0, step, [step % TOKENS]), Feed(1, step, [1])])
        if step >= 750 and step % 50 == 0:
            held.append(held_memory())
    return np.median(np.diff(held, axis=0), axis=0) / 50


def test_a_decode_step_leaves_no_memory_behind(world):
    (found,) = world(1)(models.in_turn, {name: FAMILIES[name] for name in ("llama", "mistral", "latent")}, growth)
    for name, (heap, blocks) in found.items():
        assert heap < 50, (name, heap)
        assert blocks < 1, (name, blocks)


def _without_cache(self, hidden_states, attention_mask=None, inference_params=None, rotary_pos_emb=None):
    """An attention that ignores `inference_params`."""
    return self.out_proj(hidden_states)


def refusals(fields):
    """Messages of feeds and scores that are refused; nothing enters the cache by them."""
    from mindspeed_ms.inference.model_runner import Feed
    from mindspeed_ms.legacy.model.attention import ParallelAttention

    runner = models.runner_of(fields)
    runner.forward([Feed(0, 0, list(range(25)))])
    messages = {}
    for name, feeds in {
        "slot": [Feed(4, 0, [1])],
        "twice": [Feed(1, 0, [1]), Feed(1, 0, [1])],
        "empty": [Feed(1, 0, [])],
        "outside": [Feed(1, 0, [TOKENS])],
        "negative": [Feed(1, 0, [-1])],
        "long": [Feed(0, 25, [1] * 8)],
        "gap": [Feed(1, 1, [1])],
        "window": [Feed(0, 12, [1])],
        "wants": [Feed(1, 0, [1], "all")],
    }.items():
        with pytest.raises(ValueError) as caught:
            runner.forward(feeds)
        messages[name] = str(caught.value)
    for name, arguments in {"score": ([[1] * 33],), "start": ([[1, 2]], [3]), "count": ([[1]], [0, 0])}.items():
        with pytest.raises(ValueError) as caught:
            runner.score(*arguments)
        messages[name] = str(caught.value)
    with patch.object(ParallelAttention, "construct", _without_cache), pytest.raises(ValueError) as caught:
        runner.forward([Feed(1, 0, [1])])
    messages["attention"] = str(caught.value)
    none, again = runner.forward([Feed(1, 0, [3], "none"), Feed(0, 24, [24])])
    return messages, none, again


def test_feeds_that_cannot_be_run_are_refused(world, references):
    ((messages, none, again),) = world(1)(refusals, FAMILIES["mistral"])
    for name, word in {
        "slot": "slot 4 is fed: expected one of 0 to 3",
        "twice": "expected each of them once",
        "empty": "at least one token",
        "outside": f"token id {TOKENS} is outside the vocabulary of {TOKENS} ids",
        "negative": "token id -1 is outside",
        "long": "end at 33: expected at most max_sequence_length 32",
        "gap": "position 1 of slot 1, which holds 0 tokens",
        "window": "whose window of 6 tokens reaches behind position 15",
        "wants": "expected 'last' or 'none'",
        "score": "at most max_sequence_length 32",
        "start": "scored from position 3 on",
        "count": "1 sequences and 2 starts",
        "attention": "0 of 4 layers used the cache: the attention 'self_attn' must call inference_params.attend",
    }.items():
        assert word in messages[name] and "\n" not in messages[name], messages[name]
    assert none is None
    assert again.shape == (TOKENS,)
