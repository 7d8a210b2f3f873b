"""Mutation tests: apply small changes to the code, one at a time, and list those that no test notices (docs/testing.md).

    python -m tests.mutate LIST.py [--jobs N]

`LIST.py` defines `MUTATIONS`, a list of (file, old text, new text, arguments of pytest). Each runs in a copy of the working
tree, which is never changed itself.
"""

import argparse
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
RESULTS = {0: "NOT NOTICED", 1: "noticed", 2: "noticed (at the import)"}


def run_mutation(tree, mutation, timeout):
    """Result (str) of one mutation in the copy `tree`, which is restored."""
    name, old, new, tests = mutation
    path = tree / name
    source = path.read_text(encoding="utf-8")
    if source.count(old) != 1:
        return f"NOT APPLIED: the old text occurs {source.count(old)} times"
    path.write_text(source.replace(old, new), encoding="utf-8")
    try:
        return run_tests(tree, tests, timeout)
    finally:
        path.write_text(source, encoding="utf-8")


def run_tests(tree, tests, timeout):
    """Result (str) of pytest in the copy `tree`, and its first failure."""
    command = [*os.environ.get("MUTATE_WITH", "").split(), sys.executable, "-m", "pytest", "-q", "-x", *shlex.split(tests)]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "noticed (TIMEOUT)"
    first = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    return f"{RESULTS.get(process.returncode, f'pytest ended with {process.returncode}')} {first[:160]}"


def copy_tree(folder):
    """The files of the working tree that git knows or would add, in `folder`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def main():
    """Run all mutations of a list; the exit code is 1 if one was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("list")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300.0)
    arguments = parser.parse_args()
    mutations = runpy.run_path(arguments.list)["MUTATIONS"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        trees = Queue()
        for job in range(arguments.jobs):
            trees.put(copy_tree(Path(folder, str(job))))

        def run(mutation):
            tree = trees.get()
            try:
                return run_mutation(tree, mutation, arguments.timeout)
            finally:
                trees.put(tree)

        failed = False
        for number, (mutation, result) in enumerate(zip(mutations, pool.map(run, mutations))):
            failed |= not result.startswith("noticed")
            sys.stdout.write(f"{number} {mutation[0]}: {mutation[1]!r} -> {mutation[2]!r}\n    {result}\n")
            sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
