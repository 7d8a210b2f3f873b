"""Tokens/s and peak memory of preprocess_data.py beside a plain loop over `tokenizers`' batch encoding, on the same cores.

    python benchmarks/preprocess.py [--megabytes 100] [--workers 2] [--record FILE.json]

The loop has all texts in memory and does nothing but encode, with the library's own threads on as many cores as there are
workers: it is the ceiling. preprocess_data.py reads the same texts from a jsonl file and writes the token files; its time is
that of the whole command. Memory is the sum over all its processes of their proportional share (PSS), sampled ten times a
second. The exit code is 1 if the speed is below 0.8 of the ceiling or the memory reaches 1 GB.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mindspeed_ms.spelling import SuggestingParser

LEAST_SHARE, MOST_BYTES = 0.8, 1 << 30
VOCABULARY = 16_384
BATCH = 1000
REPOSITORY = Path(__file__).resolve().parents[1]


def write_texts(folder, size):
    """A jsonl file of about `size` bytes: words of Python's standard library with their frequencies, and numbers."""
    from mindspeed_ms.core.datasets.text_documents import standard_library_documents

    source = "\n".join(text for _, text in standard_library_documents())
    words = np.array(re.findall(r"\s*\S+", source), object)
    random, written = np.random.default_rng(0), 0
    with open(folder / "texts.jsonl", "w", encoding="utf-8") as file:
        while written < size:
            chosen = words[random.integers(0, len(words), random.integers(20, 1500))]
            chosen[::17] = [f" {number:x}" for number in random.integers(0, 1 << 40, len(chosen[::17]))]
            written += file.write(json.dumps({"text": "".join(chosen)}) + "\n")
    train_tokenizer(source, folder / "tokenizer.json")


def train_tokenizer(text, path):
    """A byte-level BPE with an end of document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<|endoftext|>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.save(str(path))


def ceiling(folder):
    """Encode all texts, print tokens and seconds; runs in a process of its own."""
    from tokenizers import Tokenizer

    with open(folder / "texts.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start, tokens = time.perf_counter(), 0
    for begin in range(0, len(texts), BATCH):
        tokens += sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts[begin : begin + BATCH]))
    print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - start}))


def measured(words, environment):
    """(seconds, peak bytes of all processes, output) of a command."""
    start, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(words, env=environment, stdout=output)
        while process.poll() is None:
            peak = max(peak, sum(map(proportional_bytes, family(process.pid))))
            time.sleep(0.1)
        seconds = time.perf_counter() - start
        output.seek(0)
        if process.returncode:
            sys.exit(f"{' '.join(words)} failed")
        return seconds, peak, output.read()


def family(pid):
    """A process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    except OSError:
        return []
    return [pid] + [member for child in children for member in family(int(child))]


def proportional_bytes(pid):
    """Memory of a process, pages that it shares counted in part."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def main():
    """Measure, print, and judge."""
    parser = SuggestingParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--record", help="write the figures to this json file")
    parser.add_argument("--ceiling", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ceiling:
        return ceiling(args.ceiling)
    cores = sorted(os.sched_getaffinity(0))[: args.workers]
    os.sched_setaffinity(0, cores)
    with tempfile.TemporaryDirectory() as folder:
        figures = compare(Path(folder), args.megabytes, args.workers)
    figures["cores"] = len(cores)
    print_table(figures)
    if args.record:
        Path(args.record).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return int(figures["share_of_ceiling"] < LEAST_SHARE or figures["peak_bytes"] >= MOST_BYTES)


def print_table(figures):
    """What was measured, and the two limits."""
    share, peak = figures["share_of_ceiling"], figures["peak_bytes"]
    print("| | tokens per second | share of the ceiling | peak MB |\n|---|---|---|---|")
    print(f"| plain loop | {figures['ceiling_tokens_per_second']:.0f} | 1 | - |")
    print(f"| preprocess_data.py | {figures['tokens_per_second']:.0f} | {share:.2f} | {peak / 1e6:.0f} |")
    print(f"{'kept  ' if share >= LEAST_SHARE else 'MISSED'}  at least {LEAST_SHARE} of the ceiling")
    print(f"{'kept  ' if peak < MOST_BYTES else 'MISSED'}  peak memory below {MOST_BYTES / 1e6:.0f} MB")


def compare(folder, megabytes, workers):
    """Figures of both ways on the same texts."""
    write_texts(folder, megabytes * 10**6)
    threads = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(workers)}
    _, _, output = measured([sys.executable, __file__, "--ceiling", str(folder)], threads)
    plain = json.loads(output)
    seconds, peak, _ = measured(
        [
            sys.executable,
            str(REPOSITORY / "preprocess_data.py"),
            "--input",
            f"{folder}/texts.jsonl",
            "--tokenizer-name-or-path",
            str(folder),
            "--output-prefix",
            f"{folder}/out",
            "--workers",
            str(workers),
        ],
        dict(os.environ),
    )
    tokens = os.path.getsize(folder / "out_text_document.bin") // 2
    if tokens != plain["tokens"]:
        sys.exit(f"{tokens} tokens were written, the plain loop made {plain['tokens']}")
    return {
        "megabytes": megabytes,
        "workers": workers,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "ceiling_tokens_per_second": tokens / plain["seconds"],
        "share_of_ceiling": plain["seconds"] / seconds,
        "peak_bytes": peak,
    }


if __name__ == "__main__":
    sys.exit(main())
