"""Training runs of a small GPT in any layout; everything runs in a rank of a forked world."""

import numpy as np

from mindspeed_ms.testing.parity.runner import local_batch, micro_batches, start

SIZES = {
    "vocab_size": 64,
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "seq_length": 16,
    "init_method_std": 0.2,
    "scaled_output_init": False,
}
TIED = {**SIZES, "position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "add_bias_linear": True}
UNTIED = {
    **SIZES,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "hidden_act": "swiglu",
    "add_bias_linear": False,
    "qkv_has_bias": False,
    "out_proj_has_bias": False,
    "mlp_has_bias": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
GLOBAL_BATCH = 8
WORD_EMBEDDINGS = "language_model.embedding.word_embeddings.weight"
HEAD = "language_model.output_layer.weight"


def make_config(model, parallel=None, **sections):
    """AllConfig of a model's fields and a layout; micro-batch 1, global batch 8. Adam's epsilon hides the rounding noise
    of gradients that are truly zero."""
    from mindspeed_ms.config import init_configs_from_dict

    return init_configs_from_dict(
        {
            "model_config": model,
            "parallel_config": parallel or {},
            "dataset_config": {"batch_size": 1, "global_batch_size": GLOBAL_BATCH, **sections.get("dataset", {})},
            "training_config": {"seed": 7, "training_iters": 4, **sections.get("training", {})},
            "optimizer_config": {
                "learning_rate": 0.01,
                "lr_decay_style": "constant",
                "weight_decay": 0.1,
                "clip_grad": 1.0,
                "eps": 1e-3,
                **sections.get("optimizer", {}),
            },
            "lora_config": sections.get("lora", {}),
        }
    )


def batches(steps, length=SIZES["seq_length"], rows=GLOBAL_BATCH, seed=0):
    """Batches `tokens`, `labels`, `loss_mask` `[step, global batch, sequence]`; rows mask different numbers of tokens."""
    random = np.random.RandomState(seed)
    tokens = random.randint(0, SIZES["vocab_size"], (steps, rows, length + 1)).astype(np.int32)
    mask = (random.rand(steps, rows, length) > 0.2).astype(np.float32)
    return {"tokens": tokens[:, :, :-1], "labels": tokens[:, :, 1:], "loss_mask": mask}


def build(all_config, model_class=None):
    """(chunks, optimizer, TrainOneStep) of this rank."""
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.training.forward_step import forward_step
    from mindspeed_ms.training.model_setup import get_model, get_optimizer, get_optimizer_param_scheduler
    from mindspeed_ms.training.train_step import TrainOneStep

    start(all_config, all_config.training_config.seed)

    def model_provider(pre_process=True, post_process=True):
        return (model_class or GPTModel)(all_config.model_config, pre_process=pre_process, post_process=post_process)

    model = get_model(model_provider, all_config)
    for chunk in model:
        chunk.set_train(True)
    optimizer = get_optimizer(all_config, model)
    scheduler = get_optimizer_param_scheduler(optimizer, all_config, 4)
    return model, optimizer, TrainOneStep(model, optimizer, scheduler, forward_step)


def train(model_fields, parallel=None, steps=3, model_class=None, data=None, **sections):
    """Train; returns `{"loss", "grad_norm"}` per step and the final `weights` `{name: (sharding, array)}`."""
    all_config = make_config(model_fields, parallel, **sections)
    model, _, step = build(all_config, model_class and model_class())
    data = data or batches(steps)
    result = {"loss": [], "grad_norm": []}
    for number in range(len(data["tokens"])):
        rows = all_config.dataset_config.batch_size
        report, _ = step(micro_batches(local_batch(data, number, rows), rows), number + 1)
        result["loss"].append(report.loss)
        result["grad_norm"].append(report.grad_norm)
    result["weights"] = {
        name: (param.sharding, param.asnumpy().copy()) for chunk in model for name, param in chunk.module.parameters_and_names()
    }
    return result


def world_size(parallel, data_parallel=1):
    """Number of ranks of a layout."""
    return parallel.get("pipeline_model_parallel_size", 1) * parallel.get("tensor_model_parallel_size", 1) * data_parallel


def whole_weights(results):
    """Whole weights by name; copies of tied embeddings are checked and left out."""
    from mindspeed_ms.layout.parameters import join

    names = {name: None for result in results for name in result["weights"]}
    whole = {name: join([result["weights"][name] for result in results if name in result["weights"]]) for name in names}
    embedding, head = whole[WORD_EMBEDDINGS], whole.get(HEAD)
    if head is not None and results[0].get("tied"):
        np.testing.assert_array_equal(embedding, head)
        del whole[HEAD]
    return whole


def assert_equal_trainings(results, reference, tied, tolerance=1e-5):
    """Assert that losses, gradient norms and final weights agree within `tolerance` and ranks report equal numbers."""
    for result in [*results, *reference]:
        result["tied"] = tied
    for result in results:
        np.testing.assert_allclose(result["loss"], reference[0]["loss"], rtol=tolerance)
        np.testing.assert_allclose(result["grad_norm"], reference[0]["grad_norm"], rtol=tolerance)
    found, expected = whole_weights(results), whole_weights(reference)
    assert set(found) == set(expected)
    for name, values in expected.items():
        error = np.linalg.norm(found[name] - values) / np.linalg.norm(values)
        assert error < tolerance, f"{name}: {error:.1e}"
