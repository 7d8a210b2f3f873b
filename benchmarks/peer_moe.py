"""Times forward + backward of megatron-core 0.12.1's SequentialMLP on CPU, fp32, with the shape of `moe.py`.

Run in an environment with the `[peer]` extra. Reads commands on standard input so that `moe.py` can alternate with it in one
run: a JSON list of the tokens of each expert, answered by one JSON line [seconds, CPU seconds] of one step.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the peer's environment needs no installed mindspeed_ms

from shapes import MOE, SEED

from mindspeed_ms.testing.megatron import redirect_cuda_to_cpu


def build_experts():
    """megatron-core's SequentialMLP."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=MOE["hidden"],
        num_attention_heads=8,
        ffn_hidden_size=MOE["ffn"],
        num_moe_experts=MOE["experts"],
        moe_router_topk=MOE["topk"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        bias_activation_fusion=True,
        gradient_accumulation_fusion=False,
    )
    return SequentialMLP(MOE["experts"], config, MLPSubmodules(ColumnParallelLinear, RowParallelLinear))


def main():
    """Serve timing requests until the input ends."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29532")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    torch._dynamo.config.disable = True  # timed as installed on CPU: no compiler run
    redirect_cuda_to_cpu()
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(SEED)
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    experts = build_experts()
    rows = MOE["tokens"] * MOE["topk"]
    tokens, probs = torch.randn(rows, MOE["hidden"], requires_grad=True), torch.full((rows,), 0.5)
    grad = torch.randn(rows, MOE["hidden"])
    for line in sys.stdin:
        counts = torch.tensor(*json.loads(line))
        experts.zero_grad(set_to_none=True)
        begin = time.perf_counter(), time.process_time()
        experts(tokens, counts, probs)[0].backward(grad)
        times = time.perf_counter() - begin[0], time.process_time() - begin[1]
        sys.stdout.write(json.dumps(times) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
