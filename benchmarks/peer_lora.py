"""Times steps of a training with PEFT's adapters and torch on CPU, fp32: AdamW over the adapters alone.

Run in an environment with the `[peer]` extra: `python peer_lora.py FOLDER BATCHES.npz RANK TARGETS` (with commas between). Each
line of standard input is a number of steps, answered by one JSON line `{"seconds": [...], "losses": [...], "peak": bytes}`;
`lora.py` alternates with it in one run.
"""

import json
import os
import sys
import time

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def peak():
    """Peak resident memory of this process in bytes."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def main():
    """Serve steps until the input ends."""
    folder, batches, rank, targets = sys.argv[1:]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = LoraConfig(r=int(rank), lora_alpha=2 * int(rank), target_modules=targets.split(","), task_type="CAUSAL_LM")
    model = get_peft_model(model, settings).train()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3, weight_decay=0.0)
    data, step = np.load(batches), 0
    for line in sys.stdin:
        seconds, losses = [], []
        for _ in range(int(line)):
            begin, total = time.perf_counter(), 0.0
            tokens, labels, masks = (data[name][step % len(data[name])] for name in ("tokens", "labels", "loss_mask"))
            step += 1
            for ids, wanted in zip(tokens, np.where(masks != 0, labels, -100)):  # micro-batches
                logits = model(input_ids=torch.from_numpy(ids)).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(wanted).flatten())
                (loss / len(tokens)).backward()
                total += loss.item() / len(tokens)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - begin)
            losses.append(total)
        sys.stdout.write(json.dumps({"seconds": seconds, "losses": losses, "peak": peak()}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
