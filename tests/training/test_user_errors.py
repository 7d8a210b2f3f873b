"""Errors as one line on one rank; user's own errors keep their tracebacks."""

import contextlib
import io
import os
import sys
import types

import numpy as np
import pytest

from tests.training import tiny


def _message(function):
    from mindspeed_ms.training.user_errors import message_of

    try:
        function()
    except Exception as error:
        return message_of(error)
    raise AssertionError("no error")


def users_function(text):
    """A function of a file that is neither this package's nor Python's, calling `text`."""
    module = types.ModuleType("users")
    exec(compile(f"def run():\n    {text}\n", "/home/user/script.py", "exec"), module.__dict__)
    return module.run


def kinds(folder):
    from mindspeed_ms.config import ConfigError, Problem
    from mindspeed_ms.core.comm import PeerDiedError
    from mindspeed_ms.core.dist_checkpointing.folders import read_tracker
    from mindspeed_ms.training.utils import set_seed

    (folder / "latest_checkpointed_iteration.txt").write_text("x")

    def raises(error):
        raise error

    return {
        "class": _message(lambda: raises(ConfigError(Problem("a", "is wrong")))),
        "peer": _message(lambda: raises(PeerDiedError("rank 1 died"))),
        "raised": _message(lambda: set_seed(-1)),
        "file": _message(lambda: read_tracker(str(folder))),
        "own": _message(users_function("raise ValueError('mine')")),
        "called": _message(users_function("[][1]")),
        "device": _message(users_function("raise RuntimeError('Unsupported device target Ascend. Please check')")),
    }


def test_what_is_shown_in_one_line(world, tmp_path):
    (found,) = world(1)(kinds, tmp_path)
    assert found["class"] == "a: is wrong" and found["peer"] == "rank 1 died" and "seed is -1" in found["raised"]
    assert "expected the number of an iteration" in found["file"]
    assert found["own"] is found["called"] is None
    assert found["device"].startswith("/home/user/script.py, line 2:") and "Leave the device out" in found["device"]


def speakers():
    """Which ranks show three errors: an equal one, one of each rank, one about a peer."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.core.comm import shm_files
    from mindspeed_ms.training import user_errors

    shown = []
    shm_files.unlink(user_errors._shown_by_this_job())
    comm.world_group().barrier()
    for text, kind in (("equal", ValueError), (f"of {comm.get_rank()}", ValueError), ("peer", comm.PeerDiedError)):
        with contextlib.redirect_stderr(io.StringIO()):
            shown.append(user_errors._speaks(kind(text), text))
        comm.world_group().barrier()
    if comm.get_rank() == 0:  # of an earlier job of the same shell
        os.utime(user_errors._shown_by_this_job(), (1, 1))
        shown.append(user_errors._speaks(ValueError("equal"), "equal"))
    return shown


def test_one_rank_speaks(world):
    """The first rank says it; others say only what is another error, and nothing about a peer that has spoken."""
    found = world(2)(speakers)
    assert sum(shown[0] for shown in found) == 1 and all(shown[1] for shown in found)
    assert not any(shown[2] for shown in found)
    assert found[0][3]


def test_a_script_ends_with_code_2(capsys):
    from mindspeed_ms.config import ConfigError, Problem
    from mindspeed_ms.training import user_errors

    before = sys.excepthook, user_errors._previous_hook
    try:
        with pytest.raises(SystemExit) as ended, user_errors.in_one_line():
            raise ConfigError(Problem("--lr", "is wrong"))
        with pytest.raises(KeyError), user_errors.in_one_line():
            raise KeyError("mine")
    finally:
        sys.excepthook, user_errors._previous_hook = before
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("error: --lr: is wrong\n")


# ---- the guides' own lines -------------------------------------------------------------------------------------------


def loss_alone():
    from mindspore import Tensor

    from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import MicroBatchLoss

    loss = MicroBatchLoss.of(Tensor(np.float32(2.0)))
    with pytest.raises(ValueError, match=r"a Tensor of shape \(2,\): expected a scalar"):
        MicroBatchLoss.of(Tensor(np.zeros(2, np.float32)))
    return float(loss.differentiated.asnumpy()), {name: float(value.asnumpy()) for name, value in loss.reported.items()}


def test_a_loss_function_may_return_the_loss_alone(world):
    assert world(1)(loss_alone) == [(2.0, {"lm loss": 2.0})]


def model_parallel_first():
    from mindspeed_ms.core import comm, parallel_state

    comm.destroy()
    try:
        parallel_state.initialize_model_parallel(1)
        return comm.is_initialized(), parallel_state.get_tensor_model_parallel_world_size()
    finally:
        parallel_state.destroy_model_parallel()


def test_model_parallelism_starts_communication(world):
    assert world(1)(model_parallel_first) == [(True, 1)]


# ---- schedules and reports ------------------------------------------------------------------------------------------


def extended(folder):
    """Log lines of a resumed training whose learning rate and length are other ones, under the checkpoint's schedule."""
    from tests.checkpoint.test_options import resume, runs

    runs.train(folder / "first", training={"exit_interval": 2})
    schedule = {"learning_rate": 0.02, "use_checkpoint_opt_param_scheduler": True, "lr_decay_style": "linear"}
    return resume(folder / "second", str(folder / "first"), {"training_iters": 9}, optimizer=schedule)["log"]


def test_a_schedule_that_is_not_used_is_warned_of(world, tmp_path):
    (log,) = world(1)(extended, tmp_path)
    told = [text for text in log if "--override-opt-param-scheduler" in text]
    assert len(told) == 1 and "optimizer_config.learning_rate is 0.02 here and 0.01 there" in told[0], log


def decoupled_groups():
    from mindspore import Parameter, Tensor

    from mindspeed_ms.core.optimizer.param_groups import get_param_groups
    from mindspeed_ms.training.model_setup import get_optimizer_config

    all_config = tiny.make_config("unused")
    all_config.optimizer_config.decoupled_lr, all_config.optimizer_config.decoupled_min_lr = 0.003, 0.0001
    head, body = (Parameter(Tensor(np.zeros((2, 2), np.float32)), name=name) for name in ("head", "body"))
    head.is_embedding_or_output_parameter = True
    groups = get_param_groups([("head", head), ("body", body)], get_optimizer_config(all_config))
    return [(group["names"], group["max_lr"], group["min_lr"]) for group in groups]


def test_the_decoupled_rate_is_its_group_s(world):
    (groups,) = world(1)(decoupled_groups)
    assert groups == [(["head"], 0.003, 0.0001), (["body"], 0.05, 0.0)]
