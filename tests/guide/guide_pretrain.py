"""The guide's training script in its own order: preparation, network and pretrain blocks as they stand there.

Only the device line says CPU instead of Ascend, and the parts that the guide leaves to the user (argument provider, data,
get_batch) are filled in.
"""

# fmt: off
# ruff: noqa
import sys

import mindspore as ms
import numpy as np

from mindspeed_ms.core.config import init_configs_from_args
from mindspeed_ms.training import get_args, initialize_megatron
from mindspeed_ms.training.data import build_pretraining_data_loader, get_train_valid_test_num_samples
from mindspeed_ms.training.utils import set_parallel_context, set_seed


def _add_pangu_args(parser):
    parser.add_argument("--pangu-only", type=int, default=3)
    return parser


class Samples:
    """Rows that count upwards from different places: easy to learn."""

    def __init__(self, count, length, vocabulary):
        self.count, self.length, self.vocabulary = count, length, vocabulary

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = ((5 * index + np.arange(self.length + 1)) % self.vocabulary).astype(np.int32)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": np.ones(self.length, np.float32),
                "position_ids": np.arange(self.length, dtype=np.int32)}


def get_batch(data_iterator):
    data = next(data_iterator)
    return {"tokens": data["tokens"], "position_ids": data["position_ids"], "attention_mask": None,
            "loss_mask": data["loss_mask"], "labels": data["labels"]}


def train(model_source):
    """Run the guide's script, whose arguments are those of the process; returns this rank's losses."""

    def train_valid_test_datasets_provider(num_samples):
        config = all_config.model_config
        return Samples(num_samples[0], config.seq_length, config.vocab_size), None, None

    # 初始化megatron参数
    initialize_megatron(extra_args_provider=_add_pangu_args)
    args = get_args()
    # 根据megatron参数映射到mindspeed_ms参数
    all_config = init_configs_from_args(args)
    training_config = all_config.training_config
    # 设置环境变量，指定Ascend后端和动态图模式
    ms.set_context(device_target="CPU", mode=ms.PYNATIVE_MODE)
    # 设置并行配置，初始化组网
    set_parallel_context(all_config.parallel_config)
    # 设置随机种子
    set_seed(all_config.training_config.seed)
    # 构建数据集
    train_ds, _, _ = train_valid_test_datasets_provider(get_train_valid_test_num_samples())
    train_dataloader = build_pretraining_data_loader(train_ds, 0)

    if model_source == "guide":
        from tests.guide.guide_model import GPTModel
    else:
        from mindspeed_ms.legacy.model.gpt_model import GPTModel

    def model_provider_func(pre_process=True, post_process=True):
        """get gpt model"""
        network_with_loss = GPTModel(
            all_config.model_config,
            pre_process=pre_process,
            post_process=post_process
        )

        return network_with_loss

    from mindspeed_ms.training.training import pretrain

    run = pretrain(
        train_valid_test_datasets_provider=None,
        model_provider_func=model_provider_func,
        model_type=None,
        forward_step_func=None,
        process_non_loss_data_func=None,
        extra_args_provider=None,
        all_config=all_config,
        train_data_loader=train_dataloader,
        get_batch_func=get_batch,
        args_defaults={},
    )
    assert args.pangu_only == 4 and training_config.training_iters == run.train_state.iteration
    return {name: (p.sharding, p.asnumpy().copy()) for name, p in run.model[0].module.parameters_and_names()}
