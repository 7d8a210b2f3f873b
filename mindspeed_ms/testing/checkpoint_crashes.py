"""Training runs that fail while saving (a killed rank, a full disk), run in ranks of a forked world."""

import os
import random
import resource
import signal

from mindspeed_ms.testing import checkpoint_runs as runs

SAVES = {"save_interval": 1, "keep_checkpoint_max": 2, "resume_training": True, "use_distributed_optimizer": True}


def train(folder, **training):
    """Train with a checkpoint after each step; see `checkpoint_runs.train`."""
    return runs.train(folder, training={**SAVES, **training}, dataset={"global_batch_size": 2})


MOMENTS = {
    "tensor": ("shard_file", "_write_all", 90),
    "file": ("durable", "write_file", 6),
    "rename": ("folders.os", "rename", 4),
    "tracker": ("durable", "replace_file", 3),
    "flush": ("durable", "sync", 6),
}


class Kill:
    """SIGKILL of this rank or of all ranks, before or after the `count`-th call of a function.

    Args:
        seed (int): of all choices; `pids` are those of all ranks.
    """

    def __init__(self, seed, pids):
        choice = random.Random(seed)
        self.moment = choice.choice(sorted(MOMENTS))
        self.rank = choice.randrange(len(pids)) if self.moment in ("tensor", "file") else 0  # rank 0 publishes
        self.victims = pids if choice.random() < 0.5 else [pids[self.rank]]
        self.count = choice.randrange(MOMENTS[self.moment][2])
        self.is_after = choice.random() < 0.5

    def install(self):
        """Replace the function by one that counts its calls and kills."""
        from importlib import import_module

        module, name, _ = MOMENTS[self.moment]
        owner = os if module.endswith(".os") else import_module(f"mindspeed_ms.core.dist_checkpointing.{module}")
        original = getattr(owner, name)

        def counted(*arguments, **options):
            self.count -= 1
            if self.count < 0 and not self.is_after:
                self.kill()
            result = original(*arguments, **options)
            if self.count < 0:
                self.kill()
            return result

        setattr(owner, name, counted)

    def kill(self):
        """Kill the victims by SIGKILL."""
        for pid in self.victims:
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        if os.getpid() in self.victims:
            os.kill(os.getpid(), signal.SIGKILL)


def dies(folder, seed, **training):
    """Train until the `Kill` of this seed happens."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.training.utils import set_parallel_context

    set_parallel_context(runs.make_config(folder).parallel_config)
    kill = Kill(seed, comm.world_group().all_gather_object(os.getpid()))
    if comm.get_rank() == kill.rank:
        kill.install()
    note_progress(folder)
    return train(folder, **training)


def note_progress(folder):
    """Make rank 0 write the number of each finished step to the file `progress`."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.training.trainer import Trainer

    count = Trainer._count

    def noting(trainer, report):
        count(trainer, report)
        if comm.get_rank() == 0:
            (folder / "progress").write_text(str(trainer.train_state.iteration))

    Trainer._count = noting


def continued(folder, **training):
    """Continue the training up to iteration 5; see `train`."""
    return train(folder, training_iters=5, **training)


def error_of(folder, **training):
    """Text of the `CheckpointError` that ends a continued run."""
    from mindspeed_ms.training.checkpointing import CheckpointError

    try:
        continued(folder, **training)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("the run raised no CheckpointError")


def full_disk(folder, full_rank=1, limit=40_000, **training):
    """Train with one rank whose tensor files may not exceed `limit` bytes, which raises an error in the middle of one."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.core.dist_checkpointing import save

    write = save.write_shard

    def limited(*arguments):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            return write(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    if comm.get_rank() == full_rank:
        save.write_shard = limited
    try:
        return error_of(folder, **training)
    finally:
        save.write_shard = write
