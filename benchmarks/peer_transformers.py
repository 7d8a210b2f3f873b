"""Times greedy decoding of transformers on CPU: LlamaForCausalLM and its cache, fp32, a forward per token.

Run in an environment with the `[peer]` extra: `python peer_transformers.py FOLDER`. Reads commands on standard input so that
`generate.py` can alternate with it in one run: a JSON list of prompts (lists of ids of equal length) and a number of new
tokens, answered by one JSON line `{"first": seconds, "decode": seconds, "ids": [...]}`.
"""

import json
import os
import sys
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache


@torch.no_grad()
def generate(model, prompts, count):
    """New tokens of each prompt with the seconds until the first one and from there to the last one."""
    begin = time.perf_counter()
    cache = DynamicCache(config=model.config)
    tokens = model(torch.tensor(prompts), past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
    first = time.perf_counter()
    found = [tokens.tolist()]
    for _ in range(count - 1):
        tokens = model(tokens[:, None], past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)
        found.append(tokens.tolist())
    return {"first": first - begin, "decode": time.perf_counter() - first, "ids": list(zip(*found))}


def main():
    """Serve timing requests until the input ends."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    for line in sys.stdin:
        prompts, count = json.loads(line)
        sys.stdout.write(json.dumps(generate(model, prompts, count)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
