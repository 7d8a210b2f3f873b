"""A forward and backward of megatron-core's GPTModel on CPU: `python megatron_reference.py CASE.json OUT.npz [CASE OUT ...]`.

CASE holds `model` (TransformerConfig fields), `gpt` (GPTModel arguments), `activation`, `sequence`, `batch`, and possibly
`micro_batch`, the rows that are computed at a time. Weights follow the rule of the recordings; OUT receives the per-token
losses, every gradient and the balance losses of each layer, means over micro-batches.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))


def _activation(name):
    import torch

    return {
        "gelu": torch.nn.functional.gelu,
        "swiglu": torch.nn.functional.silu,
        "silu": torch.nn.functional.silu,
        "squared_relu": lambda x: torch.nn.functional.relu(x).square(),
        "relu": torch.nn.functional.relu,
    }[name]


def build(case):
    """The model of a case with the recordings' weights."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mindspeed_ms.testing.parity.recordings import rule_weight

    config = TransformerConfig(
        activation_func=_activation(case["activation"]),
        gated_linear_unit=case["activation"] == "swiglu",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        **case["model"],
    )
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    if config.num_moe_experts:  # the pattern of dense and expert layers is this function's
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    model = GPTModel(
        config,
        spec,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None,
        max_sequence_length=case["sequence"],
        parallel_output=True,
        **case["gpt"],
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(rule_weight(name, tuple(parameter.shape))))
    return model


def make_batch(case):
    """Random tokens `[b, s + 1]`."""
    return np.random.RandomState(7).randint(0, case["gpt"]["vocab_size"], (case["batch"], case["sequence"] + 1))


def run(case):
    """Arrays of one case."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    model, tokens = build(case), torch.from_numpy(make_batch(case))
    sequence = case["sequence"]
    mask = torch.triu(torch.ones(sequence, sequence, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(sequence).expand(case["batch"], -1)
    tracker = parallel_state.get_moe_layer_wise_logging_tracker()
    tracker.clear()
    rows = case.get("micro_batch", case["batch"])
    parts = tokens.split(rows)
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0 / len(parts))
    losses = []
    for part in parts:
        losses.append(model(part[:, :-1].contiguous(), positions[:rows], mask, labels=part[:, 1:].contiguous()))
        (losses[-1].mean() / len(parts)).backward()
    arrays = {"losses": torch.cat(losses).detach().numpy()}
    arrays |= {f"balance/{name}": found["values"].numpy() / len(parts) for name, found in tracker.items()}
    if case["model"].get("mtp_num_layers"):
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        arrays["mtp_losses"] = MTPLossLoggingHelper.tracker["values"].numpy()
    return arrays | {f"grad/{name}": p.grad.numpy() for name, p in model.named_parameters()}


def main():
    """Read the cases, run them, write the results."""
    import torch

    from mindspeed_ms.testing.megatron import redirect_cuda_to_cpu

    torch._dynamo.config.disable = True
    torch.set_num_threads(1)
    redirect_cuda_to_cpu()
    from megatron.core import parallel_state, tensor_parallel

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", os.environ.get("PEER_PORT", "29577")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    for case, out in zip(sys.argv[1::2], sys.argv[2::2]):
        np.savez(out, **run(json.loads(Path(case).read_text())))


if __name__ == "__main__":
    main()
