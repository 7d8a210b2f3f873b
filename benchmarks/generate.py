"""Decode tokens/s and time to first token of SmolLM2 beside transformers', alternating in one run; exits 1 below the ratio.

    bash examples/smollm2/convert.sh FOLDER
    python benchmarks/generate.py FOLDER                      # this package alone
    python benchmarks/generate.py FOLDER --peer-python PATH   # beside transformers (PATH: Python of an environment with [peer])

fp32, one rank, as many threads as there are cores for it (at most 2; `taskset -c 0` for one), greedy: both sides run one
forward per token over their cache and choose the largest logit. Best of alternating rounds; the ids of both must be equal.
Memory of the cache is compared with its formula. Other work on the machine decides the ratio: run it on an idle one.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from peer import Peer

from mindspeed_ms.spelling import SuggestingParser


def generate(runner, prompts, count):
    """New tokens of each prompt with the seconds until the first one and from there to the last one."""
    from mindspeed_ms.inference.model_runner import Feed

    begin = time.perf_counter()
    logits = runner.forward([Feed(slot, 0, ids) for slot, ids in enumerate(prompts)])
    tokens = [int(values.argmax()) for values in logits]
    first = time.perf_counter()
    found = [tokens]
    for step in range(count - 1):
        start = len(prompts[0]) + step
        logits = runner.forward([Feed(slot, start, (token,)) for slot, token in enumerate(tokens)])
        tokens = [int(values.argmax()) for values in logits]
        found.append(tokens)
    return {"first": first - begin, "decode": time.perf_counter() - first, "ids": list(zip(*found))}


def measure(runner, peer, batch, options):
    """One row of the table, {name: value}: best times of alternating rounds."""
    random = np.random.default_rng(batch)
    prompts = random.integers(100, runner.vocab_size, (batch, options.prompt)).tolist()
    sides = {"ours": lambda *arguments: generate(runner, *arguments)} | ({"peer": peer} if peer else {})
    answers = {name: [] for name in sides}
    for side in sides.values():
        side(prompts, 3)  # what is done once
    for _ in range(options.rounds):
        for name, side in sides.items():
            answers[name].append(side(prompts, options.tokens))
    row = {"batch": batch, "equal": len({json.dumps(found[0]["ids"]) for found in answers.values()}) == 1}
    for name, found in answers.items():
        row[f"first {name}"] = min(answer["first"] for answer in found)
        row[f"decode {name}"] = batch * (options.tokens - 1) / min(answer["decode"] for answer in found)
    if peer:
        row["first ratio"] = row["first peer"] / row["first ours"]
        row["decode ratio"] = row["decode ours"] / row["decode peer"]
    return row


def main():
    """Print the table; exit code 1 if a ratio is below `--at-least` or the texts differ."""
    parser = SuggestingParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what examples/smollm2/convert.sh made")
    parser.add_argument("--peer-python", help="Python of an environment with the [peer] extra")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-least", type=float, default=1.0, help="smallest ratio ours / peer")
    options = parser.parse_args()
    threads = str(min(2, len(os.sched_getaffinity(0))))
    os.environ.setdefault("MINDSPEED_MS_THREADS", threads)
    os.environ["OMP_NUM_THREADS"] = threads
    from mindspeed_ms.core.logging import logger
    from mindspeed_ms.inference.loading import load

    logger.setLevel("ERROR")  # no log lines in the table
    longest, slots = options.prompt + options.tokens, max(options.batches)
    loaded = load(options.folder / "native", max_sequence_length=longest, slots=slots)
    model = loaded.config.model_config
    formula = 2 * model.num_layers * model.num_query_groups * model.kv_channels * longest * slots * 4
    peer = Peer(options.peer_python, "peer_transformers.py", options.folder / "hf") if options.peer_python else None
    rows = [measure(loaded.runner, peer, batch, options) for batch in options.batches]
    if peer is not None:
        peer.close()
    sys.stdout.write(
        "| batch | first token ms | transformers | ratio | decode tokens/s | transformers | ratio | same ids |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    for row in rows:
        cells = [str(row["batch"])]
        for kind, scale in (("first", 1e3), ("decode", 1)):
            cells += [f"{row[f'{kind} {side}'] * scale:.1f}" if f"{kind} {side}" in row else "-" for side in ("ours", "peer")]
            cells.append(f"{row[f'{kind} ratio']:.2f}" if peer else "-")
        sys.stdout.write("| " + " | ".join([*cells, "yes" if row["equal"] else "NO"]) + " |\n")
    sys.stdout.write(f"cache {loaded.runner.cache.bytes} bytes, formula {formula}\n")
    missed = [name for row in rows for name, value in row.items() if name.endswith("ratio") and value < options.at_least]
    return 1 if missed or loaded.runner.cache.bytes != formula or not all(row["equal"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
