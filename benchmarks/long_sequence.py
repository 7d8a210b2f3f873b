"""Long sequences cut over ranks: memory of a rank, allocations, bytes sent and tokens/s beside one rank; exits 1 off a limit.

    python benchmarks/long_sequence.py                     # everything; a few minutes on two idle cores
    python benchmarks/long_sequence.py --parts time        # of: memory, messages, time
    python benchmarks/long_sequence.py --model FOLDER      # only the loss of a checkpoint, such as that of SmolLM2

Forward and backward of 4 layers (hidden 256, 4 heads, MLP 704, vocabulary 1024), micro-batch 1, float32, one thread per rank.

- memory: bytes that the backward keeps and the peak of all arrays (Python's own count of numpy's memory), for 1, 2 and 4
  ranks; the first must fall as 1 / ranks. No array may have as many elements as a whole score matrix of one head.
- messages: bytes that a rank sends, which must be those of `layout.sequence_messages`.
- time: best of several alternating rounds. Limits: two ranks need at most 1.15 (ring) and 1.10 (Ulysses) times the half of one
  rank's time.

--model: mean loss of the first 3072 tokens of our pages, by a checkpoint of ours, on 1, 2, 3 and 4 ranks; they must agree
within 1e-4.

The peer of the other benchmarks has no context parallelism on a CPU: --peer-python is accepted and not used.
"""

import os
import statistics
import sys
import time
import tracemalloc
from pathlib import Path
from unittest import mock

import numpy as np

from mindspeed_ms.layout.sequence import SequenceCut
from mindspeed_ms.layout.sequence_messages import attention_messages
from mindspeed_ms.spelling import SuggestingParser

LAYERS, HIDDEN, HEADS, FFN, VOCABULARY = 4, 256, 4, 704, 1024
RING, ULYSSES, HYBRID = "megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo"
CUTS = {
    "one rank": {},
    "ring 2": {"context_parallel_size": 2, "context_parallel_algo": RING},
    "ulysses 2": {"context_parallel_size": 2, "context_parallel_algo": ULYSSES},
    "ring 4": {"context_parallel_size": 4, "context_parallel_algo": RING},
    "ulysses 4": {"context_parallel_size": 4, "context_parallel_algo": ULYSSES},
    "hybrid 2x2": {"context_parallel_size": 4, "context_parallel_algo": HYBRID, "ulysses_degree_in_cp": 2},
}
TIME_LIMITS = {"ring 2": 1.15, "ulysses 2": 1.10}
MODEL_LIMIT = 1e-4
MEMORY_LIMIT = 1.10
"""Largest ratio of a rank's bytes to 1 / ranks of one rank's."""


def build(length, parallel):
    """(model, batch) on this rank."""
    from mindspore import Tensor

    from mindspeed_ms.config import init_configs_from_dict
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.training.utils import set_parallel_context, set_seed

    model = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": FFN,
        "vocab_size": VOCABULARY,
        "seq_length": length,
        "max_position_embeddings": length,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "hidden_act": "swiglu",
        "add_bias_linear": False,
        "qkv_has_bias": False,
        "out_proj_has_bias": False,
        "mlp_has_bias": False,
        "untie_embeddings_and_output_weights": True,
    }
    config = init_configs_from_dict({"model_config": model, "parallel_config": parallel})
    parallel_state.destroy_model_parallel()
    set_parallel_context(config.parallel_config)
    set_seed(1)
    cell = GPTModel(config.model_config)
    cell.set_train(True)
    tokens = np.random.RandomState(0).randint(0, VOCABULARY, (1, length + 1)).astype(np.int32)
    return cell, {"tokens": Tensor(tokens[:, :-1].copy()), "labels": Tensor(tokens[:, 1:].copy())}


def run_once(model, batch):
    """Forward and backward; the loss."""
    from mindspeed_ms.core import autograd

    loss = model(**batch)
    autograd.backward(loss)
    for parameter in model.trainable_params():
        autograd.set_grad(parameter, None)
    return float(loss.asnumpy())


def timed(length, parallel, repeats):
    """Seconds and CPU seconds of this rank for each of `repeats` forwards and backwards."""
    from mindspeed_ms.core import comm

    model, batch = build(length, parallel)
    run_once(model, batch)
    times = []
    for _ in range(repeats):
        comm.world_group().barrier()
        begin, used = time.perf_counter(), time.process_time()
        run_once(model, batch)
        times.append((time.perf_counter() - begin, time.process_time() - used))
    return times


class Allocations:
    """Largest number of elements of an array that was made while this is entered (numpy's functions that make arrays)."""

    NAMES = ("empty", "zeros", "ones", "full", "concatenate", "ascontiguousarray", "empty_like", "zeros_like", "tri")

    def __init__(self):
        self.largest = 0
        self._patches = [mock.patch.object(np, name, self._watched(getattr(np, name))) for name in self.NAMES]

    def _watched(self, function):
        def made(*args, **kwargs):
            array = function(*args, **kwargs)
            self.largest = max(self.largest, array.size)
            return array

        return made

    def __enter__(self):
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()


def memory(length, parallel):
    """Bytes on this rank: kept for the backward, peak of all arrays during a forward and backward; largest array."""
    from mindspeed_ms.layout.activation_memory import kept_bytes
    from mindspeed_ms.testing.kept_tensors import bytes_kept

    model, batch = build(length, parallel)
    run_once(model, batch)
    saved = bytes_kept(model, batch)
    tracemalloc.start()
    with Allocations() as allocations:
        run_once(model, batch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    formula = kept_bytes(model.described.model, 1, LAYERS)
    return {"kept": saved, "formula": formula, "peak": peak, "largest": allocations.largest}


def sent(length, parallel):
    """Bytes that this rank sends in the attentions of one forward and backward."""
    from mindspeed_ms.core import parallel_state

    model, batch = build(length, parallel)
    run_once(model, batch)
    counted = []

    def watch(group, name, bytes_of):
        function = getattr(group, name)

        def call(argument, *args, **kwargs):
            counted.append(bytes_of(argument))
            return function(argument, *args, **kwargs)

        return mock.patch.object(group, name, call)

    ulysses, ring = parallel_state.get_ulysses_group(), parallel_state.get_ring_group()
    exchanged = watch(ulysses, "all_to_all", lambda t: t.size * t.itemsize * (ulysses.size - 1) // ulysses.size)
    passed = watch(
        ring, "batch_isend_irecv", lambda messages: sum(m.tensor.size * m.tensor.itemsize for m in messages if m.kind == "send")
    )
    with exchanged, passed:
        run_once(model, batch)
    return sum(counted)


def expected_bytes(length, parallel):
    """Bytes by the formula."""
    cut = _cut(parallel)
    messages = attention_messages(cut, length, 1, HEADS, HEADS, HIDDEN // HEADS)
    return LAYERS * (messages.forward + messages.backward)


def _cut(parallel):
    size = parallel.get("context_parallel_size", 1)
    degrees = {RING: 1, ULYSSES: size, HYBRID: parallel.get("ulysses_degree_in_cp")}
    ulysses = degrees.get(parallel.get("context_parallel_algo"), 1)
    return SequenceCut(ulysses, size // ulysses)


MODEL_CUTS = {
    "one rank": {},
    "ring 2": CUTS["ring 2"],
    "ring 4": CUTS["ring 4"],
    "ulysses 3": {"context_parallel_size": 3, "context_parallel_algo": ULYSSES},
    "ring 3": {"context_parallel_size": 3, "context_parallel_algo": RING},
}


def loss_of_model(folder, length, parallel):
    """Mean loss (float) of a checkpoint over `length` tokens of this repository's pages."""
    from mindspore import Tensor

    from mindspeed_ms.config import argument_parser, init_configs_from_args
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.autograd import no_grad
    from mindspeed_ms.core.dist_checkpointing.load import load_tensors, open_checkpoint
    from mindspeed_ms.core.dist_checkpointing.state import model_tensors
    from mindspeed_ms.core.tensor_parallel.cell import allocate_parameters
    from mindspeed_ms.inference.checkpoint import find_checkpoint
    from mindspeed_ms.inference.loading import build_chunks
    from mindspeed_ms.inference.tokenizer import find_tokenizer
    from mindspeed_ms.training.utils import set_parallel_context, set_seed

    place, manifest = find_checkpoint(folder, None)
    flags = ["--use-checkpoint-args", "--load", place, "--finetune", "--seq-length", length, "--micro-batch-size", 1]
    flags += ["--train-iters", 1, "--lr", 1, "--loss-chunk-size", 256, "--attention-dropout", 0]
    for name, value in parallel.items():
        flags += ["--" + name.replace("_", "-"), value]
    config = init_configs_from_args(argument_parser().parse_args(list(map(str, flags))))
    parallel_state.destroy_model_parallel()
    set_parallel_context(config.parallel_config)
    set_seed(1)
    chunks = build_chunks(config, allocate_parameters)
    with open_checkpoint(place, config) as reader:
        load_tensors(reader, list(model_tensors(chunks)), vocab_size=config.model_config.vocab_size)
    chunks[0].set_train(False)
    pages = sorted((Path(__file__).resolve().parents[1] / "docs").glob("*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    ids = np.array([find_tokenizer(folder, place, manifest).tokenize(text)[: length + 1]], np.int32)
    with no_grad():
        return float(chunks[0](tokens=Tensor(ids[:, :-1].copy()), labels=Tensor(ids[:, 1:].copy())).asnumpy())


def report_model(worlds, folder, length):
    """Table of the losses; returns what differs."""
    missed, one = [], None
    _write(f"| cut | mean loss of {length} tokens | difference |\n|---|---|---|")
    for name, parallel in MODEL_CUTS.items():
        loss = worlds(_cut(parallel).size)(loss_of_model, folder, length, parallel)[0]
        one = loss if one is None else one
        _write(f"| {name} | {loss:.6f} | {loss - one:.1e} |")
        if abs(loss - one) > MODEL_LIMIT:
            missed.append(f"{name}: loss {loss} instead of {one}")
    _write()
    return missed


def _write(line=""):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def report_memory(worlds, lengths):
    """Table of the memory; returns what is off its limit."""
    missed = []
    columns = ("tokens", "cut", "kept MB", "by formula", "x ranks", "peak MB", "x ranks", "largest array / s^2")
    _write("| " + " | ".join(columns) + " |")
    _write("|---|---|---|---|---|---|---|---|")
    for length in lengths:
        one = None
        for name, parallel in CUTS.items():
            results = worlds(_cut(parallel).size)(memory, length, parallel)
            row = {key: max(result[key] for result in results) for key in results[0]}
            one = one or row
            ratios = {key: row[key] * len(results) / one[key] for key in ("kept", "peak")}
            share = row["largest"] / length**2
            cells = [length, name, *(f"{row[key] / 1e6:.1f}" for key in ("kept", "formula")), f"{ratios['kept']:.3f}"]
            cells += [f"{row['peak'] / 1e6:.1f}", f"{ratios['peak']:.3f}", f"{share:.3f}"]
            _write("| " + " | ".join(map(str, cells)) + " |")
            if ratios["kept"] > MEMORY_LIMIT:
                missed.append(f"{name} at {length}: {ratios['kept']:.2f} of 1 / ranks are kept")
            if share >= 1:
                missed.append(f"{name} at {length}: an array of {row['largest']} elements")
    _write()
    return missed


def report_messages(worlds, length):
    """Table of the bytes sent; returns what is not as the formula says."""
    missed = []
    _write("| cut | MB sent by a rank | by the formula |\n|---|---|---|")
    for name, parallel in list(CUTS.items())[1:]:
        found, formula = set(worlds(_cut(parallel).size)(sent, length, parallel)), expected_bytes(length, parallel)
        _write(f"| {name} | {max(found) / 1e6:.3f} | {formula / 1e6:.3f} |")
        missed += [f"{name}: {number} bytes sent instead of {formula}" for number in found - {formula}]
    _write()
    return missed


def report_time(worlds, length, rounds, repeats):
    """Table of the times; returns what is above its limit."""
    names = ["one rank", *TIME_LIMITS]
    times = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            by_rank = worlds(_cut(CUTS[name]).size)(timed, length, CUTS[name], repeats)
            times[name] += [tuple(max(rank[index][part] for rank in by_rank) for part in (0, 1)) for index in range(repeats)]
    best = {name: tuple(min(pair[part] for pair in values) for part in (0, 1)) for name, values in times.items()}
    ideal = {name: tuple(part / _cut(CUTS[name]).size for part in best["one rank"]) for name in names}
    _write("| cut | ms, best | median | tokens/s | of the ideal | CPU ms per rank | of the ideal | limit |")
    _write("|---|---|---|---|---|---|---|---|")
    missed = []
    for name in names:
        ratio, of_cpu = (best[name][part] / ideal[name][part] for part in (0, 1))
        median = statistics.median(pair[0] for pair in times[name])
        _write(
            f"| {name} | {best[name][0] * 1e3:.0f} | {median * 1e3:.0f} | {length / best[name][0]:.0f} | {ratio:.3f} | "
            f"{best[name][1] * 1e3:.0f} | {of_cpu:.3f} | {TIME_LIMITS.get(name, '-')} |"
        )
        if ratio > TIME_LIMITS.get(name, ratio):
            missed.append(f"{name}: {ratio:.3f} of the ideal, above {TIME_LIMITS[name]}")
    return missed


def main():
    """Print the tables; exit code 1 if something is off its limit."""
    parser = SuggestingParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="accepted and not used: the peer has no context parallelism on a CPU")
    parser.add_argument("--parts", nargs="+", default=["memory", "messages", "time"], choices=["memory", "messages", "time"])
    parser.add_argument("--model", help="folder with a checkpoint: only its losses are compared")
    parser.add_argument("--model-tokens", type=int, default=3072)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384], help="of the memory part")
    parser.add_argument("--seq-length", type=int, default=4096, help="of the other parts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    os.environ["MINDSPEED_MS_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    from mindspeed_ms.core.logging import logger
    from mindspeed_ms.testing.worlds import World, close_nursery

    logger.setLevel("ERROR")  # no log lines in the tables
    if options.peer_python:
        _write("--peer-python: not used, megatron-core has no context parallelism without Transformer Engine\n")
    made = {}

    def worlds(size):
        if size not in made:
            made[size] = World(size, timeout=600.0)
        return made[size]

    missed = []
    try:
        if options.model:
            missed += report_model(worlds, str(Path(options.model).resolve()), options.model_tokens)
            options.parts = []
        if "memory" in options.parts:
            missed += report_memory(worlds, options.lengths)
        if "messages" in options.parts:
            missed += report_messages(worlds, options.seq_length)
        if "time" in options.parts:
            missed += report_time(worlds, options.seq_length, options.rounds, options.repeats)
    finally:
        for world in made.values():
            world.close()
        close_nursery()
    for line in missed:
        _write(f"off the limit: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
