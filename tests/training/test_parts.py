"""Assembly of a training from parts: parts that are given, transforms of the model, other wrappers."""

import pytest

from tests.training import tiny
from tests.training.test_pretrain import BATCHES


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
