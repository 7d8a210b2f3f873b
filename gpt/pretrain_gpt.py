"""Pretrain a GPT: the example of the guide. Start it with `bash gpt/pretrain_gpt.sh`, or with msrun as that script does.

The data is plain text (`--data-path FILE_OR_FOLDER...`) or Megatron's indexed files (`--data-path [WEIGHT] PREFIX...`); without
any it is the source code of Python's own standard library. With `--is-instruction-dataset` it is conversations: `--data-path`
is the `--output-prefix` of preprocess_data.py.
"""

import contextlib
import sys

from mindspeed_ms.config import init_configs_from_args, require_pretraining
from mindspeed_ms.core.logging import setup_logging
from mindspeed_ms.training import gpt_datasets, initialize_megatron, same_data
from mindspeed_ms.training.start_checks import check_start
from mindspeed_ms.training.text_datasets import TextDatasets
from mindspeed_ms.training.user_errors import in_one_line


def add_example_args(parser):
    """This script's own arguments, beside Megatron's and --config."""
    group = parser.add_argument_group("pretrain_gpt.py")
    group.add_argument(
        "--prepare",
        action="store_true",
        help="check the configuration, build the corpus, print the number of ranks to start, and end",
    )
    group.add_argument("--no-sample", action="store_true", help="do not let the trained model write some text at the end")
    return parser


def get_batch(data_iterator):
    """The next micro-batch, keyed by the names of GPTModel.construct; a missing attention mask means causal attention."""
    batch = next(data_iterator)
    return {
        "tokens": batch["tokens"],
        "position_ids": batch["position_ids"],
        "attention_mask": batch.get("attention_mask"),
        "loss_mask": batch["loss_mask"],
        "labels": batch["labels"],
    }


def datasets_provider(all_config):
    """`train_valid_test_datasets_provider` of the data that the configuration names: indexed files or text."""
    indexed = gpt_datasets.names_indexed_files(all_config)
    return gpt_datasets.train_valid_test_datasets_provider if indexed else TextDatasets(all_config)


def prepare(all_config):
    """Find mistakes and build the corpus before any rank starts. Returns the number of ranks."""
    require_pretraining(all_config)
    world_size = check_start(all_config)
    provider = datasets_provider(all_config)
    if isinstance(provider, TextDatasets):
        provider.check()
    else:
        gpt_datasets.check_files(all_config)
    same_data.check_before_start(all_config, provider.fingerprint(all_config))
    return world_size


def main():
    """Train, or with --prepare only check and build the corpus."""
    prepares = "--prepare" in sys.argv[1:]
    # log lines too: the one line of output is the number of ranks
    with contextlib.redirect_stdout(sys.stderr) if prepares else contextlib.nullcontext():
        args = initialize_megatron(extra_args_provider=add_example_args)
        all_config = init_configs_from_args(args)
        if prepares:
            world_size = prepare(all_config)
    if prepares:
        print(world_size)
        return

    # Everything that runs a model is imported here: a mistake in the configuration is found sooner.
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.tools.training_report import report
    from mindspeed_ms.training.training import pretrain

    provider = datasets_provider(all_config)

    def model_provider_func(pre_process=True, post_process=True):
        """get gpt model"""
        return GPTModel(all_config.model_config, pre_process=pre_process, post_process=post_process)

    # starts device and communication (HCCL on Ascend, shared memory on CPU), lays the parallel grid over the ranks, seeds
    trainer = pretrain(
        train_valid_test_datasets_provider=provider,
        model_provider_func=model_provider_func,
        model_type=None,
        all_config=all_config,
        get_batch_func=get_batch,
    )
    corpus = provider.corpus if isinstance(provider, TextDatasets) else None
    report(trainer, corpus, with_sample=not args.no_sample)


if __name__ == "__main__":
    setup_logging()
    with in_one_line():
        main()
