"""Generation against transformers' `generate`: greedy on twenty random models, beam search (needs the `[peer]` extra)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conversion.tiny_models import CONFIGS, tensors_of, write_folder

pytestmark = pytest.mark.peer

FAMILIES = (
    "gpt2",
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
)
SEEDS = range(4)
NEW_TOKENS, END, SURE = 24, 3, 1e-3
SEARCHES = [[2, 1.0], [4, 0.0], [3, 2.0]]


def write_random(folder, family, seed):
    """A folder of a random model; weights are large enough that its tokens are not all alike."""
    config = {**CONFIGS[family], "eos_token_id": END, "bos_token_id": 0}
    tensors = {name: array * (1 if "norm" in name or "ln_" in name else 3) for name, array in tensors_of(config, seed).items()}
    return write_folder(folder, config, tensors)[0]


def ours(cases):
    """What the answer of transformers_generation.py holds, by our engine."""
    from mindspeed_ms.inference.beam_search import beam_search
    from mindspeed_ms.inference.engine import Engine
    from mindspeed_ms.inference.loading import load
    from mindspeed_ms.inference.sampling import SamplingParams

    result = {}
    for name, case in cases.items():
        loaded = load(case["folder"], slots=4, max_sequence_length=64, dtype="float32")
        params = SamplingParams(max_new_tokens=case["new_tokens"], temperature=0)
        completions = Engine(loaded.runner, None, loaded.eos_ids).generate(case["prompts"], params)
        searched = []
        for prompt in case["prompts"]:
            searched.append([])
            for number, penalty in case["beams"]:
                params = SamplingParams(max_new_tokens=case["new_tokens"], temperature=0, n=number)
                found = beam_search(loaded.runner, prompt, params, number, loaded.eos_ids, penalty)
                searched[-1].append([(list(beam.token_ids), beam.score) for beam in found])
        result[name] = {"greedy": [list(answer.token_ids) for answer in completions], "beams": searched}
    return result


@pytest.fixture(scope="module")
def answers(world, tmp_path_factory):
    """(transformers', ours), from the same folders."""
    root = tmp_path_factory.mktemp("generation")
    random, cases = np.random.RandomState(5), {}
    for family in FAMILIES:
        for seed in SEEDS:
            prompts = [random.randint(4, 64, length).tolist() for length in (1, 6, 17)]
            beams = SEARCHES if seed == 0 else []
            folder = write_random(root / f"{family}{seed}", family, seed)
            cases[f"{family}{seed}"] = {"folder": folder, "prompts": prompts, "new_tokens": NEW_TOKENS, "beams": beams}
    (root / "question.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("transformers_generation.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), str(root / "question.json"), str(root / "answer.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((root / "answer.json").read_text()), world(1)(ours, cases)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy(answers, family):
    """Equal up to the first token that is not surely ahead of the second."""
    compared = 0
    for seed in SEEDS:
        theirs, found = (answer[f"{family}{seed}"] for answer in answers)
        for ids, margins, other in zip(theirs["greedy"], theirs["margins"], found["greedy"]):
            sure = next((step for step, margin in enumerate(margins) if margin < SURE), len(ids))
            assert other[:sure] == ids[:sure]
            assert sure < len(ids) or other == ids
            compared += sure
    assert compared > 100


@pytest.mark.parametrize("family", FAMILIES)
def test_beams(answers, family):
    theirs, found = (answer[f"{family}0"]["beams"] for answer in answers)
    for searches, others in zip(theirs, found):
        for beams, other in zip(searches, others):
            np.testing.assert_allclose([score for _, score in other], [score for _, score in beams], atol=1e-4)
            assert [ids for ids, _ in other] == [ids for ids, _ in beams]
