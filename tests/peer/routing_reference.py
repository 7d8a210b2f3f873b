"""Routing of megatron-core for cases of a file; run by the peer's Python: `routing_reference.py CASES.npz RESULTS.npz`."""

import json
import sys

import numpy as np
import torch
from megatron.core.transformer.moe.moe_utils import (
    sequence_load_balancing_loss_func,
    sinkhorn,
    switch_load_balancing_loss_func,
    topk_softmax_with_capacity,
    z_loss_func,
)


def scores_of(logits, kind, topk):
    """Scores of the balance losses, as the router computes them."""
    if kind == "softmax":
        return torch.softmax(logits, dim=-1)
    scores = torch.sigmoid(logits)
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20) if topk > 1 else scores


def main(cases, results):
    data, found = np.load(cases), {}
    for number, case in enumerate(json.loads(str(data["cases"]))):
        logits = torch.tensor(data[f"logits{number}"], requires_grad=True)
        weights = torch.tensor(data[f"weights{number}"])
        options = dict(case["options"])
        if f"bias{number}" in data.files:
            options["expert_bias"] = torch.tensor(data[f"bias{number}"])
        probs, routing_map, counts = topk_softmax_with_capacity(logits, case["topk"], **options)
        scores = scores_of(logits, options.get("score_function", "softmax"), case["topk"])
        aux = switch_load_balancing_loss_func(scores, counts, case["topk"], 0.1)
        sequence = sequence_load_balancing_loss_func(scores, routing_map, 4, len(logits) // 4, case["topk"], 0.1)
        z = z_loss_func(logits, 0.1)
        ((probs * weights).sum() + aux + sequence + z).backward()
        for name, value in (("probs", probs), ("map", routing_map), ("aux", aux), ("sequence", sequence), ("z", z)):
            found[f"{name}{number}"] = value.detach().numpy()
        found[f"grad{number}"] = logits.grad.numpy()
        found[f"sinkhorn{number}"] = sinkhorn(logits.detach()).numpy()
    np.savez(results, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
