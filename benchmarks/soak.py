"""Host memory of long trainings with evaluations and checkpoints: growth of each rank's resident memory, per layout.

    python benchmarks/soak.py                       # 5,000 steps: TP2, PP2 with 2 chunks per stage, ZeRO-3 on 2 ranks
    python benchmarks/soak.py --steps 1000 --layouts tp2 z3

An evaluation and a checkpoint every 50 steps. Exits 1 if a rank grows by more than 2 MB between step 200 and the end.
"""

import argparse
import sys
import tempfile
import time

from mindspeed_ms.testing import small_trainings as job
from mindspeed_ms.testing.memory import resident_bytes
from mindspeed_ms.testing.worlds import World, close_nursery

MIB = 1 << 20
LIMIT = 2 * MIB
WARM_UP = 200
"""Steps after which nothing may grow: by then all kernels, tables and buffers of a training exist."""
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "z3": {"zero_level": "z3"},
}
RANKS = 2


def resident_sizes(layout, steps, folder):
    """Train; resident bytes of this rank after each of the `steps` steps."""
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.training.metrics import MetricsLogger
    from mindspeed_ms.training.training import build_trainer, training_run

    settings = {"training_iters": steps, "output_dir": folder, "log_level": "error", "eval_interval": 50, "eval_iters": 1}
    settings = {**settings, "save_interval": 50, "keep_checkpoint_max": 2}
    all_config = job.make_config(job.UNTIED, layout, training=settings, dataset={"global_batch_size": 4})
    sizes, data = [], job.batches(1, rows=64)

    class Sizes(MetricsLogger):
        def log_step(self, report, train_state):
            super().log_step(report, train_state)
            sizes.append(resident_bytes())

    def model_provider(pre_process=True, post_process=True):
        return GPTModel(all_config.model_config, pre_process=pre_process, post_process=post_process)

    with training_run(all_config):
        rows = [{name: values[0, row] for name, values in data.items()} for row in range(64)]
        build_trainer(all_config, model_provider, lambda _: (rows, rows, None), metrics=Sizes.of(all_config, steps)).run()
    return sizes


def main():
    """Print the table; exit code 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=5000, help=f"training steps, above {WARM_UP} (default 5000)")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="default: all")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: expected more than {WARM_UP}, from where on memory is compared")
    sys.stdout.write("| layout | rank | steps | seconds | MiB at step 200 | halfway | at the end | bytes per step |\n")
    sys.stdout.write("|---" * 8 + "|\n")
    broken = False
    for name in options.layouts:
        start = time.monotonic()
        with World(RANKS, timeout=24 * 3600) as world, tempfile.TemporaryDirectory() as folder:
            results = world(resident_sizes, LAYOUTS[name], options.steps, folder)
        seconds = time.monotonic() - start
        for rank, sizes in enumerate(results):
            first, middle, last = sizes[WARM_UP - 1], sizes[(WARM_UP + options.steps) // 2 - 1], sizes[-1]
            grows = last - first > LIMIT
            broken = broken or grows
            memory = " | ".join(f"{size / MIB:.2f}" for size in (first, middle, last))
            speed = (last - first) / (options.steps - WARM_UP)
            ending = " | GROWS\n" if grows else " |\n"
            sys.stdout.write(f"| {name} | {rank} | {options.steps} | {seconds:.0f} | {memory} | {speed:.0f}{ending}")
        sys.stdout.flush()
    close_nursery()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
