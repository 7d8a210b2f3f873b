"""Runs this package on a recording's flags and batches in one layout; everything here runs in a rank of a forked world."""
import numpy as np

from tests.parity.names import megatron_name, our_name
from tests.parity.recordings import rule_weight


def config_of(flags, extra):
    """AllConfig of Megatron flags; later flags win."""
    from mindspeed_ms.config import init_configs_from_args
    from mindspeed_ms.config.arguments import argument_parser
    return init_configs_from_args(argument_parser().parse_args([*flags, *extra]))


def start(all_config, seed):
    """Parallel groups, seeds and batch sizes of a run."""
    from mindspeed_ms.core import num_microbatches_calculator as calculator
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.training.run import init_batch_sizes
    from mindspeed_ms.training.utils import set_parallel_context, set_seed
    parallel_state.destroy_model_parallel()
    calculator.destroy_num_microbatches_calculator()
    set_parallel_context(all_config.parallel_config)
    set_seed(seed)
    init_batch_sizes(all_config)


def fill_weights(model, weights):
    """Give each parameter its part of the recording's initial weights; without a full recording, of the rule's."""
    from mindspore import Tensor

    from mindspeed_ms.core import storage
    for name, parameter in model.parameters_and_names():
        if parameter.shared_with is not None:  # the last stage's copy of tied word embeddings
            own, original, _ = parameter.shared_with
            name = name.replace(own, original)
        if weights is None:
            whole = rule_weight(megatron_name(name), parameter.sharding.global_shape)
        else:
            whole = weights[name]
        local = np.ascontiguousarray(parameter.sharding.split(whole), dtype=np.float32)
        storage.set_data(parameter, Tensor.from_numpy(local.copy()))


def local_batch(batches, step, micro_batch_size):
    """The rows of a global batch that this data-parallel rank reads, micro-batch after micro-batch, as Megatron deals them."""
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
    """The micro-batches of a local batch, one after another."""
    rows = batch["tokens"].shape[0]
    for start_row in range(0, rows, micro_batch_size):
        yield {name: None if value is None else value[start_row:start_row + micro_batch_size]
               for name, value in batch.items()}


def run(flags, extra, batches, weights=None, keep=()):
    """Train on recorded batches.

    Args:
        flags (list[str]): the recording's Megatron flags.
        extra (list[str]): flags of the layout.
        batches (dict): `tokens`, `labels`, `loss_mask`, each `[step, global batch, sequence]`.
        weights (Optional[dict]): our name -> whole initial array; None takes the recordings' rule.
        keep (sequence): of "gradients" (step 0), "weights", "moments" (at the end).

    Returns:
        dict: loss, grad_norm, lr per step; what `keep` names as `{name: (sharding, array)}`.
    """
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.training.forward_step import make_forward_step
    from mindspeed_ms.training.model_setup import get_model, get_optimizer, get_optimizer_param_scheduler
    from mindspeed_ms.training.train_step import TrainOneStep
    all_config = config_of(flags, extra)
    start(all_config, all_config.training_config.seed or 1234)

    def model_provider(pre_process=True, post_process=True):
        cell = GPTModel(all_config.model_config, pre_process=pre_process, post_process=post_process)
        fill_weights(cell, weights)
        return cell

    model = get_model(model_provider, all_config)
    optimizer = get_optimizer(all_config, model)
    scheduler = get_optimizer_param_scheduler(optimizer, all_config, all_config.training_config.training_iters)
    per_token = all_config.training_config.calculate_per_token_loss
    step = TrainOneStep(model, optimizer, scheduler, make_forward_step(per_token), per_token)
    result = {"loss": [], "grad_norm": [], "lr": []}
    if "gradients" in keep:
        _capture_first_gradients(optimizer, model, result)
    micro_batch_size = all_config.dataset_config.batch_size
    for number in range(len(batches["tokens"])):
        batch = local_batch(batches, number, micro_batch_size)
        report, _ = step(micro_batches(batch, micro_batch_size), number + 1)
        result["loss"].append(next(iter(report.losses.values())))
        result["grad_norm"].append(report.grad_norm)
        result["lr"].append(report.learning_rate)
    if "weights" in keep:
        result["weights"] = {name: (p.sharding, p.asnumpy().copy()) for name, p in _parameters(model)}
    if "moments" in keep:
        _collect_moments(optimizer, model, result)
    return result


def _parameters(model):
    return [item for chunk in model for item in chunk.module.parameters_and_names()]


def _capture_first_gradients(optimizer, model, result):
    original = optimizer.step

    def step():
        if "gradients" not in result:
            result["gradients"] = {name: (p.sharding, p.main_grad.asnumpy().copy()) for name, p in _parameters(model)}
        return original()

    optimizer.step = step


def _collect_moments(optimizer, model, result):
    shardings = {name: p.sharding for name, p in _parameters(model)}
    for name, states in optimizer.parameter_states():
        for kind in ("exp_avg", "exp_avg_sq"):
            result.setdefault(kind, {})[name] = (shardings[name], states[kind].asnumpy().copy())


def joined(results, kind):
    """Whole arrays of what every rank kept."""
    from mindspeed_ms.layout.parameters import join
    names = {name: None for result in results for name in result[kind]}
    return {name: join([result[kind][name] for result in results if name in result[kind]]) for name in names}


def our_arrays(arrays):
    """A recording's `{Megatron name: array}` under our names."""
    layer_norm = any(name.endswith(("layernorm.bias", "norm.bias")) for name in arrays)
    return {our_name(name, layer_norm): values for name, values in arrays.items()}
