"""Texts by transformers' `generate`; runs in a process of its own: QUESTION.json ANSWER.json.

QUESTION is {name: {"folder", "prompts": list of ids, "new_tokens", "beams": list of [number, length penalty]}}; ANSWER is
{name: {"greedy": ids, "margins": of each step, "beams": list of [ids, score] for each search}}, a list over the prompts each.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def greedy(model, prompt, count):
    """Greedy ids, and how far each is ahead of the second."""
    found = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    best = [torch.topk(logits[0], 2).values for logits in found.logits]
    return found.sequences[0, len(prompt) :].tolist(), [float(one - other) for one, other in best]


def beams(model, prompt, count, number, penalty):
    """All beams of a search, the best first: list of (ids up to the end token, score)."""
    found = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        do_sample=False,
        num_beams=number,
        num_return_sequences=number,
        length_penalty=penalty,
        return_dict_in_generate=True,
        output_scores=True,
    )
    result = []
    for ids, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist()):
        end = model.generation_config.eos_token_id
        result.append((ids[: ids.index(end) + 1] if end in ids else ids, score))
    return result


def main(question, answer):
    """Read the question, write the answer."""
    torch.set_num_threads(1)
    with open(question, encoding="utf-8") as file:
        cases = json.load(file)
    result = {}
    for name, case in cases.items():
        model = AutoModelForCausalLM.from_pretrained(case["folder"], dtype=torch.float32).eval()
        model.generation_config.pad_token_id = 0
        with torch.no_grad():
            found = [greedy(model, prompt, case["new_tokens"]) for prompt in case["prompts"]]
            searched = [
                [beams(model, prompt, case["new_tokens"], *search) for search in case["beams"]] for prompt in case["prompts"]
            ]
        result[name] = {"greedy": [ids for ids, _ in found], "margins": [gaps for _, gaps in found], "beams": searched}
    with open(answer, "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
