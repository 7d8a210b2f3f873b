"""Assembly of a training from parts: parts that are given, transforms of the model, other wrappers."""

import pytest

from tests.training import tiny
from tests.training.test_pretrain import BATCHES, read_metrics


def frozen_gain(cell):
    cell.gain.requires_grad = False
    return cell


def assembled(folder):
    """(parameters that trained, reports that the given metrics got, wrapped cells)."""
    from mindspeed_ms.core.distributed import DistributedDataParallel
    from mindspeed_ms.training.metrics import MetricsLogger
    from mindspeed_ms.training.training import build_trainer, get_model, training_run

    class Metrics(MetricsLogger):
        def log_step(self, report, train_state):
            reports.append((train_state.iteration, report.loss))

    class Wrapper(DistributedDataParallel):
        pass

    reports, all_config = [], tiny.make_config(folder)
    with training_run(all_config):
        model = get_model(tiny.model_provider, all_config, transforms=[frozen_gain], wrap=Wrapper)
        metrics = Metrics(str(folder), 6)
        trainer = build_trainer(all_config, None, loaders=(BATCHES, None, None), model=model, metrics=metrics)
        trainer.run()
        with pytest.raises(TypeError) as caught:
            build_trainer(all_config, None, optimiser=None)
        with pytest.raises(ValueError) as no_cell:
            get_model(tiny.model_provider, all_config, transforms=[lambda cell: None])
    trained = [name for buffer in model[0].buffers for name in buffer.names]
    return trained, reports, type(trainer.model[0]).__name__, str(caught.value), str(no_cell.value)


def test_given_parts_replace_those_of_the_configuration(world, tmp_path):
    ((trained, reports, wrapper, message, no_cell),) = world(1)(assembled, tmp_path)
    assert trained == ["embedding", "head"] and wrapper == "Wrapper"
    assert [iteration for iteration, _ in reports] == [1, 2, 3, 4, 5, 6] and reports[-1][1] < reports[0][1]
    assert message.startswith("optimiser: no part of a Trainer; its parts are all_config, training_iters")
    assert no_cell == "the transform <lambda> returned a NoneType: expected a mindspore.nn.Cell."


def with_another_wrapper(folder):
    """Losses of a training, saved at its end, whose wrapper and optimizer have nothing but the interfaces."""
    from mindspeed_ms.core import autograd, storage
    from mindspeed_ms.core.distributed import ShardedModel
    from mindspeed_ms.training.training import build_trainer, get_model, training_run

    class Wrapper(ShardedModel):
        def __init__(self, config, ddp_config, module, disable_bucketing=False):
            super().__init__(module, config, ddp_config.calculate_per_token_loss)
            self.hooks = [autograd.post_accumulate_hook(param, self.take) for param in self.trainable_parameters()]

        def take(self, param):
            grad, before = autograd.tensor_grad(param), getattr(param, "main_grad", None)
            autograd.set_grad(param, None)
            param.main_grad = grad if before is None else before + grad

        def finish_grad_sync(self):
            pass

        def scale_gradients(self, factor):
            for param in self.trainable_parameters():
                param.main_grad = param.main_grad * factor

    class Descent:
        def __init__(self, model):
            self.params = [param for chunk in model for param in chunk.trainable_parameters()]
            self.param_groups = [{"lr": 0.0, "lr_mult": 1.0, "wd_mult": 0.0, "is_decoupled_lr": False}]

        def zero_grad(self):
            for param in self.params:
                param.main_grad = None

        def get_loss_scale(self):
            return 1.0

        def step(self):
            for param in self.params:
                storage.write(param, param - param.main_grad * self.param_groups[0]["lr"])
            return True, 0.0, None

        def pieces_with_states(self):
            return []

        def counters(self):
            return {"step": 0, "grad_scaler": {}}

    settings = {"calculate_per_token_loss": True, "save_enabled": True, "check_weight_hash_across_dp_replicas_interval": 2}
    all_config = tiny.make_config(folder, training=settings, optimizer={"learning_rate": 0.5})
    with training_run(all_config):
        model = get_model(tiny.model_provider, all_config, wrap=Wrapper)
        trainer = build_trainer(all_config, None, loaders=(BATCHES, None, None), model=model, optimizer=Descent(model))
        trainer.run()
    return [line["loss"] for line in read_metrics(folder)], (folder / "iter_0000006").is_dir()


def test_a_wrapper_and_an_optimizer_need_their_interfaces_alone(world, tmp_path):
    ((losses, saved),) = world(1)(with_another_wrapper, tmp_path)
    reference = tiny.Reference()
    for step, batch in enumerate(BATCHES):
        loss, tokens, grads = reference.loss_and_gradients(batch)
        assert losses[step] == pytest.approx(loss / tokens, rel=2e-6)
        for name in grads:
            reference.weights[name] = reference.weights[name] - 0.5 * grads[name] / tokens
    assert saved


def same_names_on_both_stages():
    """Text of the error of a model whose stages call their layers alike."""
    from mindspore import nn

    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.tensor_parallel.layers import ColumnParallelLinear
    from mindspeed_ms.testing import small_trainings as job
    from mindspeed_ms.training.model_setup import get_model

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 2)
    config = job.make_config(job.UNTIED, {"pipeline_model_parallel_size": 2})

    class Stage(nn.Cell):
        def __init__(self, start):
            super().__init__()
            for number in range(start, start + 2):
                linear = ColumnParallelLinear(4, 4, config=config.model_config, init_method="normal", bias=False)
                self.insert_child_to_cell(f"linear{number}", linear)

    def names(start):
        return get_model(lambda pre_process, post_process: Stage(start), config)[0].module.parameters_dict()

    rank = parallel_state.get_pipeline_model_parallel_rank()
    assert len(names(2 * rank)) == 2
    try:
        names(rank)
    except ValueError as error:
        return str(error)


def test_a_name_on_two_stages_is_refused(world):
    for text in world(2)(same_names_on_both_stages):
        assert "1 parameters have a name" in text and "'linear1.weight' on the stages 0, 1" in text
