"""Milliseconds of a mixture of experts beside a dense MLP of the same FLOPs and beside megatron-core; exits 1 above a limit.

    python benchmarks/moe.py                      # this package alone
    python benchmarks/moe.py --peer-python PATH   # beside megatron-core (PATH: Python of an environment with `[peer]`)

Forward + backward in fp32, gradients added to their buffers: GroupedMLP with 8 experts, hidden 512, ffn 704 and the rows of
1024 tokens that go to 2 experts each; a dense MLP with ffn 1408 on 1024 tokens; megatron-core's SequentialMLP on the rows of
GroupedMLP; the whole layer, for information. One rank, as many threads as the machine has cores (at most 2). All alternate;
the best round counts, in elapsed and in CPU time, and the limits hold for CPU time, which other work on the machine disturbs
less. Then two ranks with half of the experts each: the bytes that all-to-all moves in a forward and a backward are counted at
`core/comm` and compared with their formula. `--picture FILE` draws the tokens of each expert.
"""

import os
import sys
import time
from functools import partial

import numpy as np
from peer import Peer
from shapes import MOE, SEED

from mindspeed_ms.spelling import SuggestingParser


def build(ffn=MOE["ffn"], expert_ranks=1):
    """(TransformerConfig, MoELayer) with experts of the width `ffn`, initialised, on `expert_ranks` ranks."""
    from mindspeed_ms.config import init_configs_from_args
    from mindspeed_ms.config.arguments import argument_parser
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.legacy.model.moe.moe_layer import MoELayer
    from mindspeed_ms.training.utils import set_parallel_context, set_seed

    options = {
        "num-layers": 1,
        "hidden-size": MOE["hidden"],
        "num-attention-heads": 8,
        "ffn-hidden-size": ffn,
        "num-experts": MOE["experts"],
        "moe-router-topk": MOE["topk"],
        "moe-aux-loss-coeff": 0.0,
        "moe-token-dispatcher-type": "alltoall",
        "expert-model-parallel-size": expert_ranks,
        "seq-length": MOE["tokens"],
        "max-position-embeddings": MOE["tokens"],
        "padded-vocab-size": 128,
        "micro-batch-size": 1,
        "global-batch-size": expert_ranks,
        "train-iters": 1,
        "lr": 1e-4,
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "seed": SEED,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    flags += ["--swiglu", "--disable-bias-linear", "--moe-grouped-gemm", "--untie-embeddings-and-output-weights"]
    config = init_configs_from_args(argument_parser().parse_args(flags))
    if not parallel_state.model_parallel_is_initialized():
        set_parallel_context(config.parallel_config)
        set_seed(SEED)
    return config.model_config, MoELayer(config.model_config)


def in_buffers(cell):
    """Put each parameter into a flat buffer and give it one for its gradient, as a training does."""
    from mindspeed_ms.core import storage

    for parameter in cell.trainable_params():
        place, parameter.main_grad = (
            storage.FlatBuffer(parameter.size, "float32").slice(0, parameter.size, parameter.shape) for _ in range(2)
        )
        storage.write(place, parameter)
        storage.set_data(parameter, place)
    return cell


def step_of(cell, x, *arguments):
    """A function that runs forward and backward of `cell` once."""
    from mindspeed_ms.core import autograd

    leaf, grad = autograd.set_requires_grad(x), values(*x.shape, seed=7)
    parameters = cell.trainable_params()

    def step():
        output = cell(leaf, *arguments)
        autograd.backward(output[0] if isinstance(output, tuple) else output, grad)
        for tensor in (leaf, *parameters):
            autograd.set_grad(tensor, None)

    return step


def values(*shape, seed=SEED):
    """Tensor of random float32 values."""
    from mindspeed_ms.core import storage

    return storage.from_array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def timed(step):
    """(seconds, CPU seconds) of one call."""
    begin = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def measure(peer, rounds):
    """({name: (best seconds, best CPU seconds)}, tokens of each expert)."""
    from mindspeed_ms.core import autograd
    from mindspeed_ms.legacy.model.mlp import ParallelMLP

    layer, dense = in_buffers(build()[1]), in_buffers(ParallelMLP(build(MOE["ffn"] * MOE["topk"])[0]))
    sent = values(MOE["tokens"], 1, MOE["hidden"])
    with autograd.no_grad():
        counts = layer.router(sent).sent.asnumpy().sum(axis=0, dtype=np.int64)
    grouped = step_of(layer.experts, values(MOE["tokens"] * MOE["topk"], MOE["hidden"]), counts)
    steps = {"GroupedMLP": grouped, "dense MLP, same FLOPs": step_of(dense, sent), "whole layer": step_of(layer, sent)}
    sides = {name: partial(timed, step) for name, step in steps.items()}
    if peer is not None:
        sides["megatron-core SequentialMLP"] = partial(peer, counts.tolist())
    found = {name: [] for name in sides}
    for turn in range(rounds + 2):
        for name, side in sides.items():
            times = side()
            if turn > 1:  # what is done once
                found[name].append(times)
    return {name: tuple(np.min(times, axis=0)) for name, times in found.items()}, counts.tolist()


def moved_bytes():
    """On one of two ranks: (bytes that all-to-all sent to the other in a forward and a backward, the formula's).

    For each pair of a token and one of its experts on the other rank a row of h float32 goes there with the token and back
    with the expert's output; in the backward the gradients go the same two ways.
    """
    from mindspeed_ms.core import parallel_state

    layer = build(expert_ranks=2)[1]
    group = parallel_state.get_expert_model_parallel_group()
    original, dispatch, sent, pairs = group.all_to_all, layer.dispatch, [], []

    def counted(tensor, output_splits=None, input_splits=None, async_op=False):
        rows = [count for rank, count in enumerate(input_splits) if rank != group.rank]
        sent.append(sum(rows) * tensor.shape[1] * tensor.itemsize)
        return original(tensor, output_splits, input_splits, async_op)

    def watched(tokens, routing):
        pairs.append(routing.sent.asnumpy().reshape(MOE["tokens"], group.size, -1).sum(axis=(0, 2)))
        return dispatch(tokens, routing)

    group.all_to_all, layer.dispatch = counted, watched
    step_of(layer, values(MOE["tokens"], 1, MOE["hidden"], seed=SEED + group.rank))()
    rows = group.all_gather(pairs[0].astype(np.int64)).reshape(2, 2)
    return sum(sent), 2 * int(rows[0, 1] + rows[1, 0]) * MOE["hidden"] * 4


def draw(counts, path):
    """Draw the tokens of each expert, and what each would have in balance."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.bar(range(len(counts)), counts, color="#4477aa")
    axes.axhline(sum(counts) / len(counts), color="#cc3311", linestyle="--", label="in balance")
    axes.set(xlabel="expert", ylabel="tokens", title=f"{MOE['tokens']} tokens, {MOE['topk']} experts each")
    axes.set_xticks(range(len(counts)))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main():
    """Print the table; exit code 1 if a ratio is above its limit or the bytes are not the formula's."""
    parser = SuggestingParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="Python of an environment with the [peer] extra")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--at-most-dense", type=float, default=1.25, help="largest ratio GroupedMLP / dense MLP")
    parser.add_argument(
        "--at-most-peer", type=float, default=0.8, help="largest ratio GroupedMLP / megatron-core's SequentialMLP"
    )
    parser.add_argument("--picture", help="file for the picture of the tokens of each expert (PNG)")
    options = parser.parse_args()
    threads = str(min(2, os.cpu_count() or 1))
    os.environ.setdefault("MINDSPEED_MS_THREADS", threads)
    os.environ["OMP_NUM_THREADS"] = threads
    from mindspeed_ms.core.logging import logger
    from mindspeed_ms.testing.worlds import World, close_nursery

    logger.setLevel("ERROR")  # no log lines in the table
    peer = Peer(options.peer_python, "peer_moe.py") if options.peer_python else None
    with World(2) as world:  # forked first: this process has run no operator yet
        moved = world(moved_bytes)
    close_nursery()
    times, counts = measure(peer, options.rounds)
    if peer is not None:
        peer.close()
    grouped, limits = times["GroupedMLP"], {"dense MLP, same FLOPs": options.at_most_dense}
    limits["megatron-core SequentialMLP"] = options.at_most_peer
    missed = []
    sys.stdout.write(
        "| forward + backward | ms | CPU ms | GroupedMLP / this, ms | CPU | at most |\n|---|---|---|---|---|---|\n"
    )
    for name, found in times.items():
        ratios, limit = [mine / other for mine, other in zip(grouped, found)], limits.get(name)
        cells = [f"{seconds * 1e3:.1f}" for seconds in found] + [f"{ratio:.2f}" for ratio in ratios]
        sys.stdout.write("| " + " | ".join([name, *cells, "-" if limit is None else str(limit)]) + " |\n")
        missed += [name] if limit is not None and ratios[1] > limit else []
    sys.stdout.write(f"tokens per expert {counts}\n")
    for rank, (counted, formula) in enumerate(moved):
        sys.stdout.write(f"rank {rank}: all-to-all sent {counted} bytes, formula {formula}\n")
    if options.picture:
        draw(counts, options.picture)
    if missed:
        sys.stdout.write(f"above the limit: {', '.join(missed)}\n")
    return 1 if missed or any(counted != formula for counted, formula in moved) else 0


if __name__ == "__main__":
    sys.exit(main())
