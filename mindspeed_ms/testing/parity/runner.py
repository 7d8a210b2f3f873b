"""Runner of a recording's flags and batches in one layout; everything runs in a rank of a forked world."""

import dataclasses
from unittest import mock

import numpy as np
from mindspore import mint

from mindspeed_ms.testing.parity.names import megatron_name, our_name
from mindspeed_ms.testing.parity.recordings import rule_weight


def config_of(flags, extra):
    """AllConfig of Megatron flags; later flags win."""
    from mindspeed_ms.config import init_configs_from_args
    from mindspeed_ms.config.arguments import argument_parser

    return init_configs_from_args(argument_parser().parse_args([*flags, *extra]))


def start(all_config, seed):
    """Start a run: parallel groups, seeds and batch sizes."""
    from mindspeed_ms.core import num_microbatches_calculator as calculator
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.training.data import init_batch_sizes
    from mindspeed_ms.training.utils import set_parallel_context, set_seed

    parallel_state.destroy_model_parallel()
    calculator.destroy_num_microbatches_calculator()
    set_parallel_context(all_config.parallel_config)
    set_seed(seed)
    init_batch_sizes(all_config)


def fill_weights(model, weights):
    """Fill each parameter with its part of the recording's initial weights, or of the rule's without a full recording."""
    from mindspore import Tensor

    from mindspeed_ms.core import storage

    for name, parameter in model.parameters_and_names():
        name = global_name(name, parameter)  # of the last stage's copy of tied word embeddings: the original's
        if not parameter.requires_grad:  # the expert bias, which starts as zero and is not recorded
            whole = np.zeros(parameter.sharding.global_shape, np.float32)
        elif name.endswith(("experts.weight1", "experts.weight2")):
            whole = _grouped(name, parameter.sharding.global_shape, weights)
        else:
            whole = _whole(name, parameter.sharding.global_shape, weights)
        local = np.ascontiguousarray(parameter.sharding.split(whole), dtype=np.float32)
        storage.write(parameter, Tensor.from_numpy(local.copy()))


def _whole(name, shape, weights):
    return rule_weight(megatron_name(name), shape) if weights is None else weights[name]


def _grouped(name, shape, weights):
    """Weights of single experts `[out, in]` as one tensor of grouped experts `[experts, in, out]`."""
    prefix, linear = name.rpartition(".")[0], "mapping" if name.endswith("1") else "projection"
    names = [f"{prefix}.local_experts.{expert}.{linear}.weight" for expert in range(shape[0])]
    return np.stack([_whole(one, (shape[2], shape[1]), weights).T for one in names])


def local_batch(batches, step, micro_batch_size):
    """Rows of a global batch that this data-parallel rank reads, micro-batch after micro-batch, in Megatron's order."""
    from mindspore import Tensor

    from mindspeed_ms.core import parallel_state

    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    result = {}
    for name, values in batches.items():
        blocks = values[step].reshape(-1, size, micro_batch_size, values.shape[-1])[:, rank]
        result[name] = Tensor.from_numpy(np.ascontiguousarray(blocks.reshape(-1, values.shape[-1])))
    length = batches["tokens"].shape[-1]
    rows = result["tokens"].shape[0]
    result["position_ids"] = Tensor.from_numpy(np.tile(np.arange(length, dtype=np.int32), (rows, 1)))
    result["attention_mask"] = None
    return result


def micro_batches(batch, micro_batch_size):
    """Micro-batches of a local batch, one after another."""
    rows = batch["tokens"].shape[0]
    for start_row in range(0, rows, micro_batch_size):
        yield {
            name: None if value is None else mint.narrow(value, 0, start_row, micro_batch_size) for name, value in batch.items()
        }


def run(flags, extra, batches, weights=None, keep=(), settings=None, watch=None, load=None):
    """Train on recorded batches.

    Args:
        flags (list[str]): the recording's Megatron flags.
        extra (list[str]): flags of the layout.
        batches (dict): `tokens`, `labels`, `loss_mask`, each `[step, global batch, sequence]`.
        weights (Optional[dict]): our name -> whole initial array; None takes the recordings' rule.
        keep (sequence): of "gradients" (step 0), "weights", "moments" (at the end).
        settings (Optional[dict]): values of configuration paths that have no flag.
        watch (Optional[Callable]): `(step, number)` called before each step (`TrainOneStep`) and once after the last;
            its results are kept as `watched`.
        load (Optional[str]): checkpoint from which the training goes on, with its optimizer and schedule.

    Returns:
        dict: loss, losses (all by name), grad_norm, lr per step; `recomputed`, the parts of the model
            whose forward the backward ran again; what
            `keep` names as `{name: (sharding, array)}`.
    """
    from mindspeed_ms.core.tensor_parallel.random import CheckpointFunction
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.training.checkpointing import whole_parameters
    from mindspeed_ms.training.forward_step import forward_step
    from mindspeed_ms.training.model_setup import get_model, get_optimizer, get_optimizer_param_scheduler
    from mindspeed_ms.training.train_step import TrainOneStep

    all_config = config_of(flags, extra)
    for path, value in (settings or {}).items():
        section, name = path.split(".")
        setattr(getattr(all_config, section), name, value)
    start(all_config, all_config.training_config.seed or 1234)

    def model_provider(pre_process=True, post_process=True):
        cell = GPTModel(all_config.model_config, pre_process=pre_process, post_process=post_process)
        fill_weights(cell, weights)
        return cell

    model = get_model(model_provider, all_config)
    optimizer = get_optimizer(all_config, model)
    scheduler = get_optimizer_param_scheduler(optimizer, all_config, all_config.training_config.training_iters)
    if load is not None:
        _load(load, all_config, model, optimizer, scheduler)
    step = TrainOneStep(model, optimizer, scheduler, forward_step)
    result = {"loss": [], "grad_norm": [], "lr": [], "loss_scale": [], "success": [], "watched": [], "recomputed": 0}
    result["losses"] = []
    if "gradients" in keep:
        _capture_first_gradients(optimizer, model, result)
    micro_batch_size = all_config.dataset_config.batch_size
    for number in range(len(batches["tokens"])):
        if watch is not None:
            result["watched"].append(watch(step, number))
        batch = local_batch(batches, number, micro_batch_size)
        with mock.patch.object(CheckpointFunction, "backward", side_effect=CheckpointFunction.backward) as recompute:
            report, _ = step(micro_batches(batch, micro_batch_size), number + 1)
        result["recomputed"] += recompute.call_count
        result["loss"].append(next(iter(report.losses.values())))
        result["losses"].append(report.losses)
        result["grad_norm"].append(report.grad_norm)
        result["lr"].append(report.learning_rate)
        result["loss_scale"].append(report.loss_scale)
        result["success"].append(report.finite_grads)
    if watch is not None:
        result["watched"].append(watch(step, len(batches["tokens"])))
    if "weights" in keep:
        with whole_parameters(model):
            result["weights"] = {global_name(name, p): (p.sharding, _float32(p).copy()) for name, p in _parameters(model)}
    if "moments" in keep:
        _collect_moments(optimizer, model, result)
    return result


def _load(path, all_config, model, optimizer, scheduler):
    from mindspeed_ms.core.dist_checkpointing.load import find_checkpoint, open_checkpoint
    from mindspeed_ms.training.checkpointing import load_checkpoint

    with open_checkpoint(find_checkpoint(path), all_config) as reader:
        load_checkpoint(reader, model, optimizer, scheduler)


def multiply_differentiated_loss(step, factor):
    """Multiply the loss that `step` differentiates (not the reported one) by `factor()` from now on."""
    forward_step = step.forward_step_func

    def changed_forward_step(iterator, model):
        output, loss_func = forward_step(iterator, model)

        def changed_loss(output):
            loss = loss_func(output)
            return dataclasses.replace(loss, differentiated=loss.differentiated * factor())

        return output, changed_loss

    step.forward_step_func = changed_forward_step


def _parameters(model):
    """(name, Parameter) of all chunks, without the last stage's copy of tied word embeddings."""
    return [
        (name, param)
        for chunk in model
        for name, param in chunk.module.parameters_and_names()
        if param.description.shared_with is None
    ]


def _capture_first_gradients(optimizer, model, result):
    original = optimizer.step

    def step():
        if "gradients" not in result:
            found = whole_gradients(optimizer)
            result["gradients"] = {
                global_name(name, p): (p.sharding, found[name]["grad"]) for name, p in _parameters(model) if p.requires_grad
            }
        return original()

    optimizer.step = step


def _float32(tensor):
    import mindspore as ms

    return tensor.astype(ms.float32).asnumpy()


def _collect_moments(optimizer, model, result):
    found = whole_states(optimizer)
    for name, param in _parameters(model):
        for kind, array in found[name].items() if param.requires_grad else ():
            result.setdefault(kind, {})[global_name(name, param)] = (param.sharding, array)


def whole_states(optimizer):
    """Optimizer states `{name: {state: array}}` in local shapes, joined from the data-parallel ranks' pieces."""
    return _put_together(optimizer, [state for _, state in optimizer.pieces_with_states()])


def whole_gradients(optimizer):
    """Reduced gradients `{name: {"grad": array}}`, joined like `whole_states`."""
    return _put_together(
        optimizer, [{"grad": shard.slice_grad(piece.start, piece.stop)} for shard in optimizer.shards for piece in shard.pieces]
    )


def _put_together(optimizer, states):
    states, parts, buffers = iter(states), [], {}
    for shard in optimizer.shards:
        buffers.setdefault(id(shard.buffer), (shard.buffer.sharding, []))[1].extend(
            (piece.name, piece.offset, {kind: _float32(tensor).reshape(-1).copy() for kind, tensor in next(states).items()})
            for piece in shard.pieces
        )
    for sharding, own in buffers.values():
        parts += [part for rank in (sharding.group.all_gather_object(own) if sharding else [own]) for part in rank]
    parts.sort(key=lambda part: part[1])
    shapes = {name: shape for shard in optimizer.shards for name, shape in zip(shard.buffer.names, shard.buffer.shapes)}
    return {
        name: {
            kind: np.concatenate([arrays[kind] for other, _, arrays in parts if other == name]).reshape(shape)
            for kind in parts[0][2]
        }
        for name, shape in shapes.items()
    }


def joined(results, kind):
    """Whole arrays joined from the parts of all ranks."""
    from mindspeed_ms.layout.parameters import join

    names = {name: None for result in results for name in result[kind]}
    return {name: join([result[kind][name] for result in results if name in result[kind]]) for name in names}


def global_name(name, parameter):
    """Name of a parameter in the whole model, see `core.tensor_parallel.cell`."""
    from mindspeed_ms.core.tensor_parallel import cell

    return cell.global_name(name, parameter)


def our_arrays(arrays):
    """Arrays of a recording, `{Megatron name: array}`, under our names."""
    layer_norm = any(name.endswith(("layernorm.bias", "norm.bias")) for name in arrays)
    return {our_name(name, layer_norm): values for name, values in arrays.items()}
