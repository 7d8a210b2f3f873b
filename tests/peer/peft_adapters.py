"""Adapters in PEFT: `python peft_adapters.py BASE ADAPTER MADE OUT.npz`.

OUT receives the logits after IDS of BASE with the adapters in ADAPTER (`ours`), with random adapters of PEFT (`theirs`), which
go to the folder MADE, and without any (`plain`).
"""

import sys

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

IDS = [0, 5, 17, 3, 60, 2]


def _logits(model):
    with torch.no_grad():
        return model.eval()(torch.tensor([IDS])).logits[0, -1].numpy()


def _base(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def main(base, adapter, made, out):
    """See the module."""
    results = {"plain": _logits(_base(base)), "ours": _logits(PeftModel.from_pretrained(_base(base), adapter))}
    model = _base(base)
    is_gpt2 = model.config.model_type == "gpt2"
    targets = ["c_attn", "c_fc"] if is_gpt2 else ["q_proj", "v_proj", "down_proj"]
    torch.manual_seed(0)
    settings = LoraConfig(
        r=4,
        lora_alpha=10,
        use_rslora=True,
        target_modules=targets,
        alpha_pattern={targets[1]: 3},
        fan_in_fan_out=is_gpt2,
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    model = get_peft_model(model, settings)
    results["theirs"] = _logits(model)
    model.save_pretrained(made)
    np.savez(out, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
