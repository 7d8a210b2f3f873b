"""Logits of small transformers models; runs in a process of its own: CASES.json OUT.npz.

CASES is {name: fields of the model's config, with model_type}. Weights follow the rule of the recordings, by transformers'
names; OUT receives `tokens` and the logits `[b, s, v]` of each case.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def logits_of(fields, tokens):
    """Logits (ndarray) of one case."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from mindspeed_ms.testing.parity.recordings import rule_weight

    fields = dict(fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(rule_weight(name, tuple(parameter.shape))))
        return model(torch.from_numpy(tokens)).logits.numpy()


def main():
    """Read the cases, run them, write the logits."""
    cases = json.loads(Path(sys.argv[1]).read_text())
    tokens = np.random.RandomState(5).randint(0, 96, (2, 40))
    np.savez(sys.argv[2], tokens=tokens, **{name: logits_of(fields, tokens) for name, fields in cases.items()})


if __name__ == "__main__":
    main()
