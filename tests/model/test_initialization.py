"""Build, transform, initialise: values by global name, in every layout; no use of a parameter before it has values."""

import numpy as np
import pytest

from tests.model import builders

RANK = 3  # of the toy adapter


def _values(cell):
    return {name: (parameter.sharding, parameter.asnumpy().copy()) for name, parameter in cell.parameters_and_names()}


def _add_adapters(cell):
    """A toy low-rank adapter below each column-parallel linear; a ParallelCell of its own, as a transform adds it."""
    from mindspeed_ms.core.tensor_parallel import ColumnParallelLinear, ParallelCell

    class Adapter(ParallelCell):
        def __init__(self, linear):
            super().__init__()
            sizes = {"config": linear.config, "init_method": "normal", "bias": False, "is_expert": linear.is_expert}
            self.up = ColumnParallelLinear(RANK, linear.output_size, **sizes)

    for linear in [part for _, part in cell.cells_and_names() if isinstance(part, ColumnParallelLinear)]:
        linear.adapter = Adapter(linear)


def experts(ep):
    """A user's own cell with four toy experts spread over `ep` ranks: `{global name: (sharding, values)}`.

    Beside their adapters they hold what the describer of experts says.
    """
    from mindspore import nn

    from mindspeed_ms.config import MoEConfig
    from mindspeed_ms.config.model_description import describe_model
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.tensor_parallel import deferred_initialization, initialize_parameters, place_globally
    from mindspeed_ms.core.tensor_parallel.cell import global_name
    from mindspeed_ms.layout.describers.registry import RankParts, describer
    from mindspeed_ms.legacy.model.transformer import ParallelMLP

    class Experts(nn.Cell):
        def __init__(self, config):
            super().__init__()
            count, rank = 4 // ep, parallel_state.get_expert_model_parallel_rank()
            self.local_experts = nn.CellList([ParallelMLP(config, is_expert=True) for _ in range(count)])
            for local, expert in enumerate(self.local_experts):
                place_globally(expert, f"local_experts.{rank * count + local}", f"local_experts.{local}")

    class Own(nn.Cell):
        def __init__(self, config):
            super().__init__()
            self.mlp = Experts(config)

    moe = {"moe_config": MoEConfig(num_experts=4, moe_ffn_hidden_size=48)}
    config = builders.make_config({**builders.LLAMA, **moe}, expert_model_parallel_size=ep)
    builders.start(config)
    with deferred_initialization():
        cell = Own(config)
        _add_adapters(cell)
    initialize_parameters(cell)
    assert all(name.startswith("mlp.local_experts.") for name in _values(cell))
    model = describe_model(config)
    described = describer("mlp", "experts")(model, RankParts.of(model, parallel_state.get_coordinates()))
    values = {
        global_name(name, parameter): (parameter.sharding, parameter.asnumpy().copy())
        for name, parameter in cell.parameters_and_names()
    }
    plain = {name: sharding for name, (sharding, _) in values.items() if "adapter" not in name}
    assert plain == {one.name.replace("experts", "mlp", 1): one.sharding for one in described if one.expert}
    return values


def test_experts_start_by_their_global_number(world):
    whole, split = builders.joined(world(1)(experts, 1)), world(2)(experts, 2)
    assert set(split[1]) == {key for key in whole if ".2." in key or ".3." in key}
    for part in ("weight", "adapter.up.weight"):
        name = f"mlp.local_experts.{{}}.mapping.{part}"
        assert (split[0][name.format(0)][1] != split[1][name.format(2)][1]).any()
    for key, values in builders.joined(split).items():
        np.testing.assert_array_equal(values, whole[key])


def adapted(**parallel):
    """A model whose linears get a toy low-rank adapter between build and initialisation."""
    from mindspeed_ms.core.tensor_parallel import deferred_initialization, initialize_parameters

    config = builders.make_config(builders.LLAMA, **parallel)
    builders.start(config)
    with deferred_initialization():
        model = builders.make_model(config)
        _add_adapters(model)
    initialize_parameters(model)
    return _values(model)


def test_adapters_and_model_start_alike_in_every_layout(world):
    one = builders.joined(world(1)(adapted))
    names = [f"language_model.encoder.layers.{layer}.attention.qkv_proj.adapter.up.weight" for layer in range(2)]
    assert (one[names[0]] != one[names[1]]).any()
    for parallel in ({"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}):
        two = builders.joined(world(2)(adapted, **parallel))
        assert set(one) == set(two)
        for name, values in one.items():
            np.testing.assert_array_equal(values, two[name], err_msg=name)


def toy_attention(tensor_parallel_size, **recompute):
    """A model with another attention kind, described, built and configured without an edit of existing modules."""
    from unittest.mock import patch

    from mindspeed_ms.config import init_configs_from_dict
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.tensor_parallel.layers import build_linear
    from mindspeed_ms.layout.describers import registry
    from mindspeed_ms.layout.layer_parameters import Linear
    from mindspeed_ms.layout.parameters import describe_parameters
    from mindspeed_ms.legacy.model import parts

    def linears(model):
        sizes = {"input_size": model.hidden_size, "output_size": model.hidden_size, "initializer": model.initializers.block}
        return {"up": Linear(column=True, **sizes, bias=None), "down": Linear(column=False, **sizes, bias=None)}

    def describe(model, rank):
        return [one for name, linear in linears(model).items() for one in registry.describe_linear(rank, name, linear)]

    class Mixer(parts.LayerCell):
        def __init__(self, config, layer_number, attention_type=None, attn_mask_type=None):
            super().__init__(config)
            made = linears(self.described.model)
            self.up = build_linear(made["up"], self.described)
            self.down = build_linear(made["down"], self.described, input_is_parallel=True)

        def construct(self, hidden_states, attention_mask=None, inference_params=None, rotary_pos_emb=None):
            return self.down(self.up(hidden_states)[0])

    with patch.dict(registry._DESCRIBERS["attention"]), patch.dict(parts._CELLS["attention"]):
        registry.register_describer("attention", "mixer")(describe)
        parts.register_part("attention", "mixer")(Mixer)
        parallel = {"tensor_model_parallel_size": tensor_parallel_size}
        sections = {"model_config": {**builders.LLAMA, "attention_type": "mixer", **recompute}, "parallel_config": parallel}
        config = init_configs_from_dict(sections).model_config
        builders.start(config)
        model = builders.make_model(config)
        described = describe_parameters(model.described.model, parallel_state.get_coordinates())
    built = {name: parameter.sharding for name, parameter in model.parameters_and_names()}
    assert built == {one.local_name: one.sharding for one in described}
    selective = {"recompute_granularity": "selective", "use_flash_attention": True}
    assert all(layer.mlp.recompute_activation == (recompute == selective) for layer in model.language_model.encoder.layers)
    loss = float(model(**builders.batch(config)).asnumpy())
    return loss, _values(model)


def test_another_attention_kind(world):
    one, two = world(1)(toy_attention, 1), world(2)(toy_attention, 2)
    assert two[0][0] == pytest.approx(one[0][0], rel=1e-6)
    whole, joined = (builders.joined([values for _, values in results]) for results in (one, two))
    for name, values in whole.items():
        np.testing.assert_array_equal(values, joined[name])


def test_a_kind_that_cannot_recompute_selectively_refuses_it(world):
    """Under flash attention the MLP recomputes, whatever the attention."""
    with pytest.raises(ValueError, match="Mixer recomputes nothing selectively"):
        world(1)(toy_attention, 1, recompute_granularity="selective")
    world(1)(toy_attention, 1, recompute_granularity="selective", use_flash_attention=True)


def test_a_kind_is_known_only_while_it_is_registered():
    from mindspeed_ms.config import ConfigError, init_configs_from_dict

    with pytest.raises(ConfigError, match=r"attention_type.*expects one of self_attn"):
        init_configs_from_dict({"model_config": {**builders.LLAMA, "attention_type": "mixer"}})


def without_values():
    """Every way to use, to copy or to set a parameter before it has values."""
    import copy

    import mindspore as ms
    from mindspore import Tensor, mint, ops

    from mindspeed_ms.core import storage
    from mindspeed_ms.core.released_parameter import UnfilledParameterError
    from mindspeed_ms.core.tensor_parallel import RowParallelLinear, deferred_initialization, initialize_parameters

    config = builders.make_config(builders.LLAMA)
    builders.start(config)
    arguments = {"config": config, "init_method": "normal", "bias": True, "input_is_parallel": True}
    with deferred_initialization():
        cell, other, loaded, assigned = (RowParallelLinear(4, 4, **arguments) for _ in range(4))
    own = Tensor(np.full((4, 4), 5, np.float32))
    uses = {
        "asnumpy": lambda: cell.weight.asnumpy(),
        "tolist": lambda: cell.weight.tolist(),
        "save_checkpoint": lambda: ms.save_checkpoint(cell, "never_written.ckpt"),
        "operator": lambda: mint.sum(cell.weight),
        "reflected": lambda: 2.0 * cell.weight,
        "index": lambda: cell.weight[0],
        "setitem": lambda: cell.weight.__setitem__(slice(None), own),
        "assign": lambda: ops.assign(cell.weight, own),
        "deepcopy": lambda: copy.deepcopy(cell.weight),
        "data": lambda: mint.sum(cell.weight.data),
        "forward": lambda: cell(own),
    }
    for name, use in uses.items():
        with pytest.raises(UnfilledParameterError, match=r"'weight' has no values yet.*initialize_parameters\(cell\)"):
            use()
            raise AssertionError(f"{name} used a parameter without values")
    assert cell.weight.shape == (4, 4) and "not initialised" in repr(cell.weight)
    for give in (cell.weight.set_data, cell.weight.assign_value):
        with pytest.raises(ValueError, match=r"'weight' was given values of shape \(2, 4\): expected \(4, 4\)"):
            give(own[:2])
    cell.weight.set_data(own)
    storage.set_data(cell.bias, Tensor(np.full(4, 6, np.float32)))
    other.weight.data = own
    storage.write(other.bias, Tensor(np.full(4, 6, np.float32)))
    ms.load_param_into_net(loaded, {"weight": ms.Parameter(own, name="weight")})
    assigned.weight.assign_value(own)
    for _ in range(2):
        for one in (cell, other, loaded, assigned):
            initialize_parameters(one)
    return [parameter.asnumpy() for one in (cell, other, loaded, assigned) for parameter in (one.weight, one.bias)]


def test_a_parameter_without_values_refuses_every_use_and_keeps_what_it_was_given(world):
    for values, expected in zip(world(1)(without_values)[0], (5, 6, 5, 6, 5, 0, 5, 0), strict=True):
        assert (values == expected).all()
