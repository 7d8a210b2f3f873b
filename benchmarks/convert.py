"""Speed and memory of converting a made-up llama in bfloat16, beside a plain copy and a loop of torch.load and torch.save.

    python benchmarks/convert.py                      # 2 GB
    python benchmarks/convert.py --peer-python PATH   # beside torch (PATH: Python of an environment with `[peer]`)

Conversions: Megatron, two tensor-parallel ranks -> ours, four; Hugging Face -> ours. Each runs in a process of its own, timed
without its imports; so does the torch loop, over the Megatron files. The best of the rounds counts, which alternate; files are
read from the page cache, and every written file is synced to the disk, for all alike. Prints one table; exits 1 if the peak
memory of a conversion is not below a quarter of the model, or its speed not twice that of the torch loop.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path

from mindspeed_ms.spelling import SuggestingParser

LEAST_RATIO, MOST_MEMORY = 2.0, 0.25
_REPORT = """
import json, sys, time
started = time.perf_counter()
{work}
seconds = time.perf_counter() - started
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
print(json.dumps([seconds, peak]))
"""
_CONVERT = "import contextlib, io\nfrom mindspeed_ms.tools.converter.__main__ import main\n" + _REPORT.format(
    work="with contextlib.redirect_stdout(io.StringIO()):\n    code = main(sys.argv[1:])\nif code: sys.exit(code)"
)
_LOOP = """
import glob, os, sys
def synced(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
"""
_FILES = (
    "source, target = sys.argv[1:]\nfor number, path in enumerate(sorted(glob.glob(source + '/**/*.pt', recursive=True))):\n"
)
_TORCH = (
    "import torch\n"
    + _LOOP
    + _REPORT.format(
        work=_FILES + "    to = f'{target}/{number}.pt'\n    os.makedirs(target, exist_ok=True)\n"
        "    torch.save(torch.load(path, weights_only=False), to)\n    synced(to)"
    )
)
_COPY = (
    "import shutil\n"
    + _LOOP
    + _REPORT.format(
        work=_FILES + "    to = f'{target}/{number}.pt'\n    os.makedirs(target, exist_ok=True)\n"
        "    shutil.copyfile(path, to)\n    synced(to)"
    )
)


def config_of(gigabytes):
    """config.json of a llama whose bfloat16 weights have about `gigabytes`."""
    hidden = 2048 if gigabytes >= 1 else 1024
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 0,
        "vocab_size": 16 * hidden,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    outside = size_of(config)
    layer = size_of(config | {"num_hidden_layers": 1}) - outside
    return config | {"num_hidden_layers": max(1, round((gigabytes * 1e9 - outside) / layer))}


def shapes_of(config):
    """Names and shapes of the tensors of a llama, in the order of their file."""
    hidden, ffn, rows = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    groups = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes = {"model.embed_tokens.weight": (rows, hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (groups, hidden),
                "self_attn.v_proj": (groups, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (ffn, hidden),
                "mlp.up_proj": (ffn, hidden),
                "mlp.down_proj": (hidden, ffn),
            }.items()
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (rows, hidden)}


def size_of(config):
    """Bytes of the weights in bfloat16."""
    return 2 * sum(prod(shape) for shape in shapes_of(config).values())


def write_model(folder, config):
    """Write the Hugging Face folder with random weights."""
    import numpy as np

    from mindspeed_ms.core.dist_checkpointing.shard_file import Entry, write_shard

    def entry(number, name, shape):
        def data():
            bits = np.random.default_rng(number).integers(0, 1 << 14, prod(shape), np.uint16)  # finite
            return bits.view(np.uint8)

        return Entry(name, "bfloat16", shape, 2 * prod(shape), data)

    os.makedirs(folder)
    Path(folder, "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    entries = [entry(number, name, shape) for number, (name, shape) in enumerate(shapes_of(config).items())]
    write_shard(os.path.join(folder, "model.safetensors"), entries, made_by="pt")


def run(python, code, *words):
    """(seconds, peak bytes) that a process with this code reports."""
    ended = subprocess.run([python, "-c", code, *words], capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{python} {' '.join(words)} ended with code {ended.returncode}: {ended.stderr[-2000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def convert_words(source, target, *words):
    """Words of the converter's command."""
    return ["--load-dir", source, "--save-dir", target, *words]


def measure(folder, peer_python, rounds):
    """{row: (seconds of its fastest round, largest peak)}; sources are the folders hf and megatron of `folder`."""
    hf, megatron, result = (os.path.join(folder, name) for name in ("hf", "megatron", "result"))
    native = ("--save-model-type", "native", "--target-tensor-parallel-size")
    jobs = {
        "plain copy": (sys.executable, _COPY, megatron, result),
        "Megatron TP2 -> native TP4": (sys.executable, _CONVERT, *convert_words(megatron, result, *native, "4")),
        "Hugging Face -> native": (sys.executable, _CONVERT, *convert_words(hf, result, *native, "1")),
    }
    if peer_python:
        jobs["torch.load + torch.save"] = (peer_python, _TORCH, megatron, result)
    found = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            found[name].append(run(*job))
            shutil.rmtree(result)
    return {name: (min(one[0] for one in times), max(one[1] for one in times)) for name, times in found.items()}


def missed(rows, nbytes):
    """Texts of the limits that the rows of `measure` miss, for a model of `nbytes`."""
    texts, loop = [], rows.get("torch.load + torch.save")
    for name, (seconds, peak) in rows.items():
        if "->" not in name:
            continue
        if not peak < MOST_MEMORY * nbytes:
            texts.append(f"{name}: peak memory {peak / nbytes:.2f} of the model, limit {MOST_MEMORY}")
        if loop is not None and not loop[0] / seconds >= LEAST_RATIO:
            texts.append(f"{name}: {loop[0] / seconds:.2f} times the speed of the torch loop, limit {LEAST_RATIO}")
    return texts


def main():
    """Print the table; exit code 1 if a limit is missed."""
    parser = SuggestingParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the model")
    parser.add_argument("--peer-python", help="Python of an environment with the [peer] extra")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to measure; by default the system's for temporary files")
    options = parser.parse_args()
    config = config_of(options.gigabytes)
    nbytes = size_of(config)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_model(os.path.join(folder, "hf"), config)
        two_ranks = convert_words(
            os.path.join(folder, "hf"), os.path.join(folder, "megatron"), "--target-tensor-parallel-size", "2"
        )
        run(sys.executable, _CONVERT, *two_ranks)
        rows = measure(folder, options.peer_python, options.rounds)
    loop = rows.get("torch.load + torch.save")
    sys.stdout.write(
        f"{nbytes / 1e9:.2f} GB, {config['num_hidden_layers']} layers\n\n"
        "| | GB/s | times the torch loop | peak memory MB | of the model |\n"
        "|---|---|---|---|---|\n"
    )
    for name, (seconds, peak) in rows.items():
        ratio = f"{loop[0] / seconds:.2f}" if loop else "-"
        sys.stdout.write(f"| {name} | {nbytes / 1e9 / seconds:.2f} | {ratio} | {peak / 1e6:.0f} | {peak / nbytes:.2f} |\n")
    texts = missed(rows, nbytes)
    sys.stdout.write("".join(f"missed: {text}\n" for text in texts))
    return 1 if texts else 0


if __name__ == "__main__":
    sys.exit(main())
