"""Describers that are registered from outside: another attention kind, an adapter below every linear."""

from dataclasses import replace

import numpy as np
import pytest

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.layout.adapters import Adapter
from mindspeed_ms.layout.describers import registry
from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.layer_parameters import EmbeddingTable, Linear
from mindspeed_ms.layout.parameters import describe_parameters, describe_whole_model
from mindspeed_ms.layout.ranks import WorldLayout
from mindspeed_ms.layout.sharding import join
from tests.layout.test_experts import MOE, configured

LAYER = "language_model.encoder.layers.2"


@pytest.fixture
def registered(monkeypatch):
    """A registry with a toy attention and a toy adapter beside the real describers."""
    copies = {part: dict(kinds) for part, kinds in registry._DESCRIBERS.items()}
    monkeypatch.setattr(registry, "_DESCRIBERS", copies)

    @registry.register_describer("attention", "toy")
    def describe_toy(model, rank):
        sizes = {"input_size": model.hidden_size, "output_size": model.hidden_size, "initializer": model.initializers.block}
        return registry.describe_linear(rank, "mix", Linear(column=True, **sizes, bias=None))

    @registry.register_describer("adapter", "toy")
    def describe_low_rank(weight, part, adapter):
        width = weight.sharding.global_shape[1]
        table = EmbeddingTable(rows=adapter.rank, width=width, initializer=weight.initializer, is_cut=False)
        return registry.placed("adapter", table.describe(part))

    return registry


def names_of(model):
    return [one.name for one in describe_whole_model(model)]


def test_another_attention_kind_needs_no_edit(registered):
    model = replace(describe_model(configured(2, 1, 4, moe=MOE)), attention_type="toy")
    names = names_of(model)
    assert f"{LAYER}.attention.mix.weight" in names and f"{LAYER}.attention.qkv_proj.weight" not in names
    with pytest.raises(
        LayoutError, match=r"attention 'other' is unknown, choose one of \['self_attn', 'multi_latent', 'toy'\]"
    ):
        describe_whole_model(replace(model, attention_type="other"))
    with pytest.raises(ValueError, match="attention 'toy' has a describer already"):
        registered.register_describer("attention", "toy")(names_of)


def test_adapters_add_to_their_targets_alone_and_all_layouts_hold_the_same_state(registered):
    """Special settings of a cell come before general ones; everything else is frozen."""
    plain = describe_model(configured(2, 1, 4, moe=MOE))
    special = Adapter("toy", (rf"{LAYER}\.attention\.qkv_proj",), rank=3, alpha=1.0)
    model = replace(
        plain, adapters=(special, Adapter("toy", (r".*_proj", r".*\.mlp\..*(mapping|projection)"), rank=2, alpha=1.0))
    )
    added = set(names_of(model)) - set(names_of(plain))
    linears = {name.removesuffix(".weight") for name in names_of(plain) if "_proj." in name or ".mlp." in name}
    linears = {name for name in linears if not name.endswith(("router.gating", "router.expert_bias"))}
    assert added == {f"{linear}.adapter.weight" for linear in linears}
    assert f"{LAYER}.mlp.experts.local_experts.7.mapping.adapter.weight" in added
    described = {one.name: one for one in describe_whole_model(model)}
    assert {name for name, one in described.items() if one.trainable} == added
    rows = {one.sharding.global_shape[0]: one.layer for one in described.values() if "qkv_proj.adapter" in one.name}
    assert rows[3] == 2 and set(rows) == {2, 3}
    assert all(described[name].expert == ("local_experts" in name) for name in added)
    pieces, layout = {}, WorldLayout.from_description(model.parallel, 8)
    whole = {one.name: np.random.default_rng(0).normal(size=one.sharding.global_shape) for one in describe_whole_model(model)}
    for rank in range(8):
        for one in describe_parameters(model, layout, rank):
            pieces.setdefault(one.name, []).append((one.sharding, one.sharding.split(whole[one.name])))
    assert set(pieces) == set(whole)
    for name, parts in pieces.items():
        np.testing.assert_array_equal(join(parts), whole[name])
