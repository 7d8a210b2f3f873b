"""Dropout, precision, doors and errors of the whole model."""

import numpy as np
import pytest

from tests.model import builders

DROPOUT = {**builders.GPT2, "init_method_std": 0.2, "hidden_dropout": 0.3, "attention_dropout": 0.3}


def dropout(fields, parallel):
    """Losses of two training calls, of a call after reseeding, and of two evaluations."""
    from mindspeed_ms.core.tensor_parallel import model_parallel_manual_seed

    config = builders.make_config(fields, **parallel)
    builders.start(config)
    model, data = builders.make_model(config), builders.batch(config)
    losses = []
    for seed in (3, None, 3):
        if seed is not None:
            model_parallel_manual_seed(seed)
        losses.append(float(model(**data).asnumpy()))
    model.set_train(False)
    return losses + [float(model(**data).asnumpy()) for _ in range(2)]


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize(
    "parallel", [{}, {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}]
)
def test_dropout_is_applied_and_repeatable(world, parallel, flash):
    """Ranks agree on the loss, so hidden states that are equal on them dropped alike."""
    size = parallel.get("tensor_model_parallel_size", 1)
    results = world(size)(dropout, {**DROPOUT, "use_flash_attention": flash}, parallel)
    first, second, again, evaluated, evaluated_again = results[0]
    assert first == again != second and evaluated not in (first, second) and evaluated == evaluated_again
    assert all(result == results[0] for result in results)


def dropped_by_a_layer(fields, parallel):
    """Share of the elements that a layer drops, in training and in evaluation, of each block while the other one adds 0."""
    from mindspore import Tensor

    from mindspeed_ms.core import storage
    from mindspeed_ms.legacy.model.transformer import ParallelTransformerLayer

    config = builders.make_config({**DROPOUT, "attention_dropout": 0.0, **fields}, **parallel)
    builders.start(config)
    hidden, shares = Tensor(np.random.RandomState(1).randn(16, 4, 64).astype(np.float32)), []
    for silent in ("attention.out_proj", "mlp.projection"):
        layer = ParallelTransformerLayer(config, 1, self_attn_mask_type="causal")
        for name, parameter in layer.parameters_and_names():
            if name.startswith(silent):
                storage.write(parameter, parameter * 0)
        for training in (True, False):
            layer.set_train(training)
            shares.append(float((layer(hidden).asnumpy() == hidden.asnumpy()).mean()))
    return shares


@pytest.mark.parametrize("fields", [{}, {"use_sandwich_norm": True, "normalization": "RMSNorm"}], ids=["plain", "sandwich"])
def test_a_layer_drops_elements_of_both_blocks(world, fields):
    """The layer alone: in a whole model the embedding's dropout would hide that of the layers."""
    for parallel in ({}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}):
        for shares in world(parallel.get("tensor_model_parallel_size", 1))(dropped_by_a_layer, fields, parallel):
            assert shares[::2] == pytest.approx([0.3, 0.3], abs=0.04) and shares[1::2] == [0.0, 0.0]


def precise(fields, parallel):
    """Loss, one gradient norm and the dtypes on the way."""
    from mindspeed_ms.core import autograd

    config = builders.make_config({**fields, "init_method_std": 0.1}, **parallel)
    builders.start(config)
    model, data = builders.make_model(config), builders.batch(config)
    hidden = model.language_model(data["tokens"], data["position_ids"], None)
    loss = model(**data)
    autograd.backward(loss)
    parameter = model.language_model.encoder.layers[1].mlp.mapping.weight
    gradient = autograd.tensor_grad(parameter).float().asnumpy()
    return float(loss.asnumpy()), float(np.linalg.norm(gradient)), str(hidden.dtype), str(parameter.dtype)


@pytest.mark.parametrize(
    "fields, hidden, kept",
    [
        ({"params_dtype": "bfloat16"}, "BFloat16", "BFloat16"),
        ({"params_dtype": "float16", "fp16_lm_cross_entropy": True}, "Float16", "Float16"),
        ({"compute_dtype": "bfloat16"}, "BFloat16", "Float32"),
        ({"params_dtype": "bfloat16", "fp32_residual_connection": True}, "Float32", "BFloat16"),
    ],
    ids=["bf16", "fp16", "mixed", "fp32_residual"],
)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_half_precision_stays_near_float32(world, model, fields, hidden, kept):
    exact = world(1)(precise, builders.VARIANTS[model], {})[0]
    for parallel in ({}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}):
        size = parallel.get("tensor_model_parallel_size", 1)
        loss, norm, *dtypes = world(size)(precise, {**builders.VARIANTS[model], **fields}, parallel)[0]
        assert abs(loss - exact[0]) < 0.02 * exact[0]
        if size == 1:
            assert abs(norm - exact[1]) < 0.03 * exact[1]
        assert dtypes == [hidden, kept]


def outputs():
    """Logits whole and cut, a tied head, token types, missing masks."""
    from mindspeed_ms.core import autograd
    from mindspeed_ms.legacy.model.gpt_model import GPTModel

    config = builders.make_config(builders.GPT2, tensor_model_parallel_size=2)
    builders.start(config)
    data = builders.batch(config)
    with autograd.no_grad():
        cut = GPTModel(config)(data["tokens"])
        whole = GPTModel(config, parallel_output=False)(data["tokens"])
        typed = GPTModel(config, num_tokentypes=2)
        with pytest.raises(ValueError, match="tokentype_ids"):
            typed(data["tokens"])
        assert typed(data["tokens"], tokentype_ids=data["tokens"] * 0).shape == cut.shape
        everything = GPTModel(config)(data["tokens"], labels=data["labels"])
        masked = GPTModel(config)(data["tokens"], labels=data["labels"], loss_mask=data["loss_mask"] * 0 + 1)
        assert float(everything.asnumpy()) == float(masked.asnumpy())
    return cut, whole


def test_outputs(world):
    results = world(2)(outputs)
    assert results[0][0].shape == (2, 32, 64)
    np.testing.assert_array_equal(np.concatenate([result[0] for result in results], -1), results[0][1])


def bad_models():
    """Every refusal says which option, its value and what is expected."""
    from mindspeed_ms.config import LoraConfig, ModelParallelConfig, TransformerConfig
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.legacy.model.transformer import ParallelTransformerLayer

    def config(fields=None, **parallel):
        """Bypasses the cross-field checks where the configuration has some of its own."""
        made = TransformerConfig(
            **builders.LLAMA, parallel_config=ModelParallelConfig(tensor_model_parallel_size=2, **parallel)
        )
        for name, value in (fields or {}).items():
            made.__dict__[name] = value
        return made

    good = config()
    builders.start(good)
    cases = [
        (r"num_query_groups 1 .*tensor_model_parallel_size 2", {"num_query_groups": 1}),
        (r"num_attention_heads 4 .*num_query_groups 3", {"num_query_groups": 3}),
        (r"vocab_size 127 .*tensor_model_parallel_size 2", {"vocab_size": 127}),
        (r"ffn_hidden_size 175 .*tensor_model_parallel_size 2", {"ffn_hidden_size": 175}),
        (r"hidden_act 'swish'", {"hidden_act": "swish"}),
        (r"normalization 'BatchNorm'", {"normalization": "BatchNorm"}),
        (r"position_embedding_type 'alibi'", {"position_embedding_type": "alibi"}),
        (r"window_attn_skip_freq \[1, 0\] expects .*each of the 4", {"sliding_window": 5, "window_attn_skip_freq": [1, 0]}),
        (r"model_config.fp8_format = 'e4m3': is not available: there is no fp8", {"fp8_format": "e4m3"}),
        (r"lora_config.use_lora = True: low-rank adapters is not", {"lora_config": LoraConfig(use_lora=True)}),
    ]
    for text, fields in cases:
        with pytest.raises(ValueError, match=text):
            GPTModel(config(fields))
    with pytest.raises(ValueError, match="pipeline stages"):
        GPTModel(config(pipeline_model_parallel_size=2))
    with pytest.raises(ValueError, match="retriever_flag"):
        GPTModel(good, retriever_flag=1)
    with pytest.raises(ValueError, match="drop_path_rate"):
        ParallelTransformerLayer(good, 1, drop_path_rate=0.1)
    with pytest.raises(ValueError, match="layer_type"):
        ParallelTransformerLayer(good, 1, layer_type="decoder")
    return _bad_calls(GPTModel(good), builders.batch(good)) + len(cases)


def _bad_calls(model, data):
    from mindspore import Tensor

    outside = data["tokens"].asnumpy().copy()
    outside[1, 3] = 128
    calls = [
        ("128", {"tokens": Tensor.from_numpy(outside)}),
        ("retriever_input_ids", {"tokens": data["tokens"], "retriever_input_ids": data["tokens"]}),
        ("attention_mask of shape", {"tokens": data["tokens"], "attention_mask": Tensor(np.zeros((3, 32, 32), bool))}),
        ("loss_mask", {"tokens": data["tokens"], "labels": data["labels"], "loss_mask": Tensor(np.ones((2, 31), np.float32))}),
        ("tokens are float32: expected integers", {"tokens": data["tokens"].float()}),
        ("tokens are a str", {"tokens": "some text"}),
        ("tokens have shape", {"tokens": data["tokens"][0]}),
        ("labels of shape .* do not fit tokens", {"tokens": data["tokens"][:1], "labels": data["labels"]}),
        ("label 128 .sample 1, position 3. is outside", {"tokens": data["tokens"], "labels": Tensor.from_numpy(outside)}),
    ]
    for text, arguments in calls:
        with pytest.raises(ValueError, match=text):
            model(**arguments)
    with pytest.raises(RuntimeError, match="one tensor"):
        model.set_input_tensor([None, None])
    masked = np.ones((2, 32), np.float32)
    masked[1, 3] = 0.0
    hidden = {"labels": Tensor.from_numpy(outside), "loss_mask": Tensor(masked)}
    assert np.isfinite(model(data["tokens"], **hidden).asnumpy())  # what is masked may be anything
    return len(calls)


def test_errors(world):
    assert world(2)(bad_models) == [19, 19]
