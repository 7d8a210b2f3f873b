"""Greedy answers of a PEFT folder on its base, in transformers and torch.

Run in an environment with the `[peer]` extra: `python peer_lora_answers.py BASE ADAPTER PAIRS.json`. PAIRS is a list of (ids of
a prompt, ids of its answer); prints a JSON list of answers of the same lengths.
"""

import json
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def main():
    """See the module."""
    base, adapter, pairs = sys.argv[1:]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
    model.generation_config.eos_token_id = None  # answers are as long as the wanted ones
    answers = []
    with open(pairs, encoding="utf-8") as file:
        for prompt, answer in json.load(file):
            ids = torch.tensor([prompt])
            made = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=len(answer), pad_token_id=0
            )
            answers.append(made[0, len(prompt) :].tolist())
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
