"""docs/new-model-variant.md: its two modules, put where the page says, give a GPTModel with that attention kind."""

import re
import sys
import textwrap
import types

from mindspeed_ms.testing.worlds import World
from tests.documented.pages import ROOT
from tests.model import builders


def modules_of_the_page():
    """[(dotted name, source)] of the steps that name a file `mindspeed_ms/.../<kind>.py`."""
    page = (ROOT / "docs" / "new-model-variant.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\d\. `(\S+)/<kind>\.py`.*?^ +```python\n(.*?)^ +```", page, re.DOTALL | re.MULTILINE)
    return [(f"{folder.replace('/', '.')}.mixer", textwrap.dedent(code)) for folder, code in steps]


def train(modules):
    """Names, global shapes and cuts of the built and the described parameters, the loss, and the sums of |gradients|."""
    for name, code in modules:  # before the configuration is imported, which takes the kinds that are registered
        module = types.ModuleType(name)
        exec(compile(code, name, "exec"), vars(module))
        sys.modules[name] = module
    from mindspeed_ms.config import init_configs_from_dict
    from mindspeed_ms.config.model_description import describe_model
    from mindspeed_ms.core import autograd, parallel_state
    from mindspeed_ms.layout.parameters import describe_parameters

    model_config = {**builders.LLAMA, "num_layers": 2, "attention_type": "mixer"}
    config = init_configs_from_dict(
        {"model_config": model_config, "parallel_config": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}
    ).model_config
    builders.start(config)
    model = builders.make_model(config)
    loss = model(**builders.batch(config))
    autograd.backward(loss)
    described = describe_parameters(describe_model(config), parallel_state.get_coordinates())
    gradients = {name: abs(gradient).sum() for name, (_, gradient) in builders.local_gradients(model).items()}
    built = [(name, parameter.sharding) for name, parameter in model.parameters_and_names()]
    return built, [(one.local_name, one.sharding) for one in described], float(loss.asnumpy()), gradients


def test_the_modules_of_the_page_are_an_attention_kind():
    modules = modules_of_the_page()
    assert [name for name, _ in modules] == ["mindspeed_ms.layout.describers.mixer", "mindspeed_ms.legacy.model.mixer"]
    with World(2) as world:  # of its own: no later test sees the kind
        results = world(train, modules)
    for built, described, loss, gradients in results:
        assert built == described and len([name for name, _ in built if "attention.up.weight" in name]) == 2
        assert 4.5 < loss < 5.5 and loss == results[0][2]  # a new model: about log(vocab_size)
        assert min(gradients.values()) > 0
