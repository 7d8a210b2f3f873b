"""Times one training step of megatron-core 0.12.1 on CPU: forward + backward + clip + AdamW, local layer spec, fp32.

Run in an environment with the `[peer]` extra. Reads commands on standard input so that `step.py` can alternate with it in
one run: lines of JSON, [shape, repeats], answered by one JSON line `{"plain": [ms...], "fused": [ms...], "loss": first loss}`.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import shapes
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the peer's environment needs no installed mindspeed_ms

from mindspeed_ms.testing.megatron import redirect_cuda_to_cpu


def build_model(name):
    """megatron-core's GPTModel of one shape with its local layer spec."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    shape = shapes.SHAPES[name]
    gated = shape["activation"] == "swiglu"
    config = TransformerConfig(
        num_layers=shapes.LAYERS,
        hidden_size=shapes.HIDDEN,
        num_attention_heads=shapes.HEADS,
        ffn_hidden_size=shape["ffn"],
        normalization=shape["norm"],
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        add_bias_linear=shape["bias"],
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=shape["norm"]),
        shapes.VOCABULARY,
        shapes.SEQUENCE,
        position_embedding_type="rope" if shape["rope"] else "learned_absolute",
        parallel_output=True,
        share_embeddings_and_output_weights=shape["tied"],
    )


def make_step(model, fused):
    """A function that runs one training step and returns its loss."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": shapes.WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=shapes.LEARNING_RATE, betas=shapes.BETAS, eps=shapes.EPSILON, fused=fused)
    generator = torch.Generator().manual_seed(shapes.SEED)
    tokens = torch.randint(0, shapes.VOCABULARY, (shapes.MICRO_BATCH, shapes.SEQUENCE + 1), generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(shapes.SEQUENCE).expand(shapes.MICRO_BATCH, -1)
    mask = torch.triu(torch.ones(shapes.SEQUENCE, shapes.SEQUENCE, dtype=torch.bool), 1)[None, None]
    parameters = list(model.parameters())

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = model(inputs, positions, mask, labels=labels).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, shapes.CLIP)
        optimizer.step()
        return loss.item()

    return step


def main():
    """Serve timing requests until the input ends."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    torch._dynamo.config.disable = True  # timed as installed on CPU: no compiler run
    redirect_cuda_to_cpu()
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(shapes.SEED)
    # its tracker swaps CUDA generator states; dropout is 0 here, so nothing is drawn
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    steps = {}
    for line in sys.stdin:
        name, repeats = json.loads(line)
        if name not in steps:
            torch.manual_seed(shapes.SEED)
            model = build_model(name)
            steps[name] = {"plain": make_step(model, False), "fused": make_step(model, True)}
            first = steps[name]["plain"]()
            steps[name]["fused"]()
            steps[name]["loss"] = first
        answer = {"loss": steps[name]["loss"]}
        for kind in ("plain", "fused"):
            times = []
            for _ in range(repeats):
                begin = time.perf_counter()
                steps[name][kind]()
                times.append((time.perf_counter() - begin) * 1e3)
            answer[kind] = times
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
