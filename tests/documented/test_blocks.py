"""Every yaml and Python block of README and docs: configurations are read, code is run."""

import sys

import pytest

from mindspeed_ms.config import init_configs_from_yaml
from tests.documented.pages import PAGES, ROOT, blocks
from tests.documented.sandbox import Sandbox, write_chat_model, write_indexed, write_tokenizer

pytestmark = [pytest.mark.documented, pytest.mark.slow]
DEFAULT = [str(ROOT / "configs" / "cpu_default" / f"{name}.yaml") for name in ("model", "accelerate", "train")]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")])
def test_yaml_of_a_page(page, tmp_path):
    """Each block is a configuration when it lies over the default one."""
    for number, block in enumerate(blocks(page, "yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block.text, encoding="utf-8")
        init_configs_from_yaml([*DEFAULT, str(file)])


TINY = (
    "--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 1 --vocab-size 500 --make-vocab-size-divisible-by 1 --eval-iters 0"
)


def _data(sandbox):
    for name in ("books", "other"):
        write_indexed(sandbox, f"data/{name}")
    return f"""
import sys

sys.path.insert(0, "gpt")
sys.argv[1:] = "{TINY} --train-iters 2 --lr 1e-3 --data-path data/books".split()
from pretrain_gpt import get_batch
from mindspeed_ms.config import init_configs_from_args
from mindspeed_ms.legacy.model.gpt_model import GPTModel
from mindspeed_ms.training import get_args, initialize_megatron

initialize_megatron()


def model_provider(pre_process=True, post_process=True):
    config = init_configs_from_args(get_args()).model_config
    return GPTModel(config, pre_process=pre_process, post_process=post_process)


vocab_size = 500
"""


def _training_loop(sandbox):
    return f"""{_data(sandbox)}
import numpy as np
from mindspore import Tensor

from mindspeed_ms.training.gpt_datasets import train_valid_test_datasets_provider as datasets_provider

all_config = init_configs_from_args(get_args())
hidden_states, balance_loss = Tensor(np.ones((2, 3), np.float32)), Tensor(np.float32(1))
"""


def _checkpoints(sandbox):
    write_indexed(sandbox, "books")
    done = sandbox.run(
        f"/bin/bash gpt/pretrain_gpt.sh --config configs/cpu_default/*.yaml {TINY} --padded-vocab-size 500 --data-path books "
        "--train-iters 500 --world 1 --tensor-model-parallel-size 1 --no-sample --log-interval 100"
    )
    assert done.returncode == 0, done.stdout
    return ""


def _templates(sandbox):
    write_tokenizer(sandbox, "Qwen3-0.6B")
    return ""


def _inference(sandbox):
    write_chat_model(sandbox, "models/Qwen2.5")
    return ""


PREPARATION = {
    "docs/data.md": _data,
    "docs/checkpoints.md": _checkpoints,
    "docs/inference.md": _inference,
    "docs/tokenizers-and-templates.md": _templates,
    "docs/training-loop.md": _training_loop,
}
ELSEWHERE = (  # these change the package
    "docs/new-model-family.md",  # test_new_model_family.py
    "docs/new-model-variant.md",  # test_new_model_variant.py
    "docs/new-optimizer.md",  # test_blocks_of_package.py
    "docs/new-option.md",  # tests/config/test_new_option.py
)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python") and page not in ELSEWHERE])
def test_python_of_a_page(page, tmp_path):
    """The blocks of a page are one program."""
    sandbox = Sandbox(tmp_path)
    before = PREPARATION.get(page, lambda sandbox: "")(sandbox)
    program = "\n".join([before, *(block.text for block in blocks(page, "python"))])
    done = sandbox.run(f"{sys.executable} - <<'END'\n{program}\nEND")
    assert done.returncode == 0, done.stdout
