"""megatron-core's checkpoints of tiny models in any layout: `python megatron_folders.py CASES.json FOLDER`.

CASES maps a name to a case: `layout` (tp, pp, vpp, ep, etp, cp, dp), `model` (TransformerConfig fields), `gpt` (GPTModel's
arguments), `activation`, `bf16`, `fp16`, `distributed`, `fused`, `bucket_size`, `grouped`, `order`, `formats`, `args` (further
ones). With `load`, that folder is loaded by megatron-core instead, and FOLDER/NAME/loaded.json says what differs. Each rank is
forked. Weights and optimizer states follow `rule` by the global name of the format torch_dist, so that who knows the names
knows all values. FOLDER/NAME/FORMAT/iter_0000010 is a checkpoint as Megatron saves it, FOLDER/NAME/shapes.json has the global
shapes.
"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
import zlib
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.peer.megatron_models import ITERATION, adam, arguments, build, initialize, prepare, size, unwrapped  # noqa: E402

SCHEDULE = {
    "max_lr": 0.01,
    "lr_warmup_steps": 0,
    "num_steps": 40,
    "lr_decay_style": "linear",
    "lr_decay_steps": 100,
    "min_lr": 0.0,
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_style": "constant",
    "wd_incr_steps": 100,
}


def rule(key, shape):
    """Values of a global tensor of the format torch_dist."""
    values = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(shape).astype(np.float32)
    return np.abs(values) if "exp_avg_sq" in key else values


def sharded_model(case, model):
    """Megatron's sharded state dicts: {"model": ...} or {"model0": ..., ...}."""
    from megatron.core import parallel_state

    result = {}
    for number, chunk in enumerate(model):
        if len(model) > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(number)
        result["model" if len(model) == 1 else f"model{number}"] = unwrapped(chunk).sharded_state_dict()
    return result


def tensors(tree):
    """(global name, part of a tensor, its values by `rule`) of all parts in a sharded state dict."""
    import torch
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for one in list(nested_values(tree)):
        built = one.build() if isinstance(one, ShardedTensorFactory) else one
        for part in nested_values({"part": built}):
            if not isinstance(part, ShardedTensor) or part.data is None:
                continue
            key = part.key.removeprefix("chained_0.").removeprefix("chained_1.")
            local = (1,) * part.prepend_axis_num + tuple(part.local_shape)
            index = tuple(slice(start, start + length) for start, length in zip(part.global_offset, local))
            values = torch.from_numpy(np.ascontiguousarray(rule(key, part.global_shape)[index])).reshape(part.local_shape)
            if part.flattened_range is not None:
                values = values.reshape(-1)[part.flattened_range]
            yield key, part, values
        if built is not one and "experts.experts" in one.key:  # GroupedMLP gives copies
            with torch.no_grad():
                one.data.copy_(one.merge_fn(dict_list_map_outplace(_content, built)).reshape(one.data.shape))


def _content(value):
    return value.data if hasattr(value, "global_shape") else value.unwrap() if hasattr(value, "unwrap") else value


def fill(tree, shapes, skipped=()):
    """Give all tensors of a sharded state dict their values."""
    import torch

    with torch.no_grad():
        for key, part, values in tensors(tree):
            if not key.startswith(skipped):
                shapes[key] = list(part.global_shape)
                part.data.copy_(values.reshape(part.data.shape))


def differences(tree, skipped=()):
    """Names of tensors in a sharded state dict that have other values, and how many there are."""
    import torch

    found, count = [], 0
    for key, part, values in tensors(tree):
        count += 1
        if not key.startswith(skipped) and not torch.equal(part.data, values.reshape(part.data.shape).to(part.data.dtype)):
            found.append(key)
    return found, count


def state(case):
    """What goes beside the model and the optimizer."""
    return {
        "args": arguments(case),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "opt_param_scheduler": SCHEDULE,
        "num_floating_point_operations_so_far": 1.0,
    }


def save_torch(case, model, optimizer, folder):
    """Save as `--ckpt-format torch` does."""
    import torch
    from megatron.core import parallel_state

    at = parallel_state
    name = f"mp_rank_{at.get_tensor_model_parallel_rank():02d}"
    name += f"_{at.get_pipeline_model_parallel_rank():03d}" if size(case, "pp") > 1 else ""
    name += f"_{at.get_expert_model_parallel_rank():03d}" if size(case, "ep") > 1 else ""
    path = folder / f"iter_{ITERATION:07d}" / name
    os.makedirs(path, exist_ok=True)
    if case.get("distributed"):
        optimizer.save_parameter_state(str(path / "distrib_optim.pt"))
    if at.get_expert_data_parallel_rank() == 0:
        tree = {**state(case), "optimizer": optimizer.state_dict()}
        for number, chunk in enumerate(model):
            if len(model) > 1:
                at.set_virtual_pipeline_model_parallel_rank(number)
            tree["model" if len(model) == 1 else f"model{number}"] = unwrapped(chunk).state_dict_for_save_checkpoint()
        torch.save(tree, path / "model_optim_rng.pt")


def save_torch_dist(case, model, optimizer, folder, sharding_type, fully_parallel):
    """Save as `--ckpt-format torch_dist` does."""
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    at = parallel_state
    path = folder / f"iter_{ITERATION:07d}"
    os.makedirs(path, exist_ok=True)
    torch.distributed.barrier()
    tree = {**state(case), **sharded_model(case, model)}
    shards = {key: value for key, value in tree.items() if key.startswith("model")}
    kind = {"sharding_type": sharding_type} if case.get("distributed") else {}
    tree["optimizer"] = optimizer.sharded_state_dict(shards, **kind)
    shape, place = (
        (size(case, "pp"), size(case, "tp")),
        (at.get_pipeline_model_parallel_rank(), at.get_tensor_model_parallel_rank()),
    )
    tree["rng_state"] = ShardedObject("rng_state", [{"a": 1}], shape, place, replica_id=at.get_data_parallel_rank())
    strategy = get_default_save_sharded_strategy("torch_dist", 1)
    if fully_parallel:
        strategy = FullyParallelSaveStrategyWrapper(strategy, at.get_data_parallel_group(with_context_parallel=True))
    dist_checkpointing.save(tree, str(path), strategy, preprocess_common_before_consistancy_check=lambda common: {})


def run(rank, world, meeting, work):
    """Call `work` on a rank of a world that meets at the file `meeting`."""
    import torch

    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        work()
    finally:
        torch.distributed.destroy_process_group()


def generate(case, folder):
    """All checkpoints of a case, by one rank."""
    import torch

    initialize(case)
    model = build(case)
    optimizer = adam(case, model)
    shapes = {}
    shards = sharded_model(case, model)
    fill(shards, shapes)
    kind = {"sharding_type": "fully_sharded_model_space"} if case.get("distributed") else {}
    skipped = () if case.get("bf16") or case.get("fp16") else ("optimizer.state.fp32_param",)  # the weights themselves
    tree = optimizer.sharded_state_dict(sharded_model(case, model), **kind)
    fill(tree, shapes, skipped)
    everything = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everything, shapes)
    if torch.distributed.get_rank() == 0:
        merged = {key: shape for one in everything for key, shape in one.items()}
        (folder / "shapes.json").write_text(json.dumps(merged))
    for name in case["formats"]:
        if name == "torch":
            save_torch(case, model, optimizer, folder / name)
        else:
            kind, _, how = name.removeprefix("torch_dist").removeprefix("-").partition("+")
            save_torch_dist(case, model, optimizer, folder / name, kind or "fully_sharded_model_space", how == "fully")
        torch.distributed.barrier()


def load(case, folder):
    """Load the checkpoint `case["load"]` as Megatron does, all keys as it wants them, and compare every value."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    initialize(case)
    model = build(case)
    optimizer = adam(case, model)
    kind = {"sharding_type": "fully_sharded_model_space"} if case.get("distributed") else {}
    shards = sharded_model(case, model)
    tree = {**shards}
    if case.get("with_optimizer", True):
        tree["optimizer"] = optimizer.sharded_state_dict(shards, is_loading=True, **kind)
    loaded = dist_checkpointing.load(tree, case["load"], strict=StrictHandling.RAISE_ALL)
    assert loaded["iteration"] == ITERATION and loaded["args"].num_layers == case["model"]["num_layers"]
    for number, chunk in enumerate(model):
        unwrapped(chunk).load_state_dict(loaded["model" if len(model) == 1 else f"model{number}"])
    found, count = differences(sharded_model(case, model))
    if case.get("with_optimizer", True):
        optimizer.load_state_dict(loaded["optimizer"])
        skipped = () if case.get("bf16") or case.get("fp16") else ("optimizer.state.fp32_param",)
        others, number = differences(optimizer.sharded_state_dict(sharded_model(case, model), **kind), skipped)
        found, count = found + others, count + number
    everything = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everything, (found, count))
    if torch.distributed.get_rank() == 0:
        different = sorted({key for one, _ in everything for key in one})
        result = {"different": different, "count": sum(number for _, number in everything)}
        (folder / "loaded.json").write_text(json.dumps(result))


def in_world(size, work, meeting):
    """Fork the ranks of a world, each of which calls `work`; whether one failed."""
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)
                run(rank, size, meeting, work)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        pids.append(pid)
    failed, running = False, list(pids)
    while running and not failed:
        pid, status = os.waitpid(-1, 0)
        running.remove(pid)
        failed = status != 0
    for pid in pids:  # ranks that wait for the one that failed, and the helpers of megatron-core's writer
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for pid in running:
        os.waitpid(pid, 0)
    return failed


def main():
    """Generate the checkpoints of all cases."""
    prepare()
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    failed = []
    for name, case in cases.items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        world = size(case, "tp") * size(case, "pp") * size(case, "cp") * size(case, "dp")
        if in_world(
            world, lambda case=case, place=place: (load if "load" in case else generate)(case, place), place / "meeting"
        ):
            failed.append(name)
        print(name, f"{time.monotonic() - started:.1f} s", "FAILED" if name in failed else "", flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
