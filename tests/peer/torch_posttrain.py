"""Supervised fine-tuning and DPO by transformers and torch; runs in a process of its own: QUESTION.json ANSWER.npz."""

import copy
import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def log_probabilities(model, ids, labels):
    """Of the labels that are not -100: sums over the sequence, and their number."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float()
    following = torch.tensor(labels[1:])
    mask = following != -100
    picked = torch.log_softmax(logits, -1).gather(1, following.clamp(min=0)[:, None])[:, 0]
    return (picked * mask).sum(), mask.sum()


def sft_loss(model, rows):
    """Mean over the tokens of the global batch."""
    pairs = [log_probabilities(model, row["input_ids"], row["labels"]) for row in rows]
    return -sum(total for total, _ in pairs) / sum(count for _, count in pairs)


def dpo_loss(model, rows, reference, beta):
    """Sigmoid loss, mean over the pairs."""
    losses = []
    for row in rows:
        ratios = []
        for kind in ("chosen", "rejected"):
            arguments = row[f"{kind}_input_ids"], row[f"{kind}_labels"]
            with torch.no_grad():
                known = log_probabilities(reference, *arguments)[0]
            ratios.append(log_probabilities(model, *arguments)[0] - known)
        losses.append(-torch.nn.functional.logsigmoid(beta * (ratios[0] - ratios[1])))
    return sum(losses) / len(losses)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        question = json.load(file)
    answer = {}
    for stage, steps in question["steps"].items():
        model = AutoModelForCausalLM.from_pretrained(question["folder"], dtype=torch.float32, attn_implementation="eager")
        reference = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=question["lr"], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        curve = []
        for rows in steps:
            optimizer.zero_grad()
            loss = sft_loss(model, rows) if stage == "sft" else dpo_loss(model, rows, reference, question["beta"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            curve.append(float(loss))
        answer[stage] = curve
    np.savez(sys.argv[2], **answer)
