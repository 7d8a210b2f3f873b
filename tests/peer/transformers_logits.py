"""Logits of transformers' models of Hugging Face folders; runs in a process of its own: QUESTION.json ANSWER.npz."""

import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        question = json.load(file)
    answer = {}
    for name, folder in question["folders"].items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            answer[name] = model(torch.tensor(question["tokens"])).logits.numpy()
    np.savez(sys.argv[2], **answer)
