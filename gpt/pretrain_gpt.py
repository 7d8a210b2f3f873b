"""Pretrain a GPT: the example of the guide. Start it with `bash gpt/pretrain_gpt.sh`, or with msrun as that script does.

The data is plain text (`--data-path FILE_OR_FOLDER...`) or Megatron's indexed files (`--data-path [WEIGHT] PREFIX...`); without
any it is the source code of Python's own standard library. With `--is-instruction-dataset` it is conversations: `--data-path`
is the `--output-prefix` of preprocess_data.py.
"""

import contextlib
import os
import sys

from mindspeed_ms.config import init_configs_from_args
from mindspeed_ms.core.datasets import text_corpus
from mindspeed_ms.core.datasets.token_dataset import TokenDataset
from mindspeed_ms.core.logging import setup_logging
from mindspeed_ms.training import gpt_datasets, initialize_megatron
from mindspeed_ms.training.start_checks import check_start
from mindspeed_ms.training.user_errors import in_one_line

LARGEST_VOCABULARY = 32_768  # of the BPE that is trained here; the model may have more rows


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


def build_corpus(all_config):
    """The encoded text that the configuration names (text_corpus.TextCorpus); built once, then found again.

    Raises:
        FileNotFoundError, CorpusError: the text is missing, or none that can be used.
    """
    dataset = all_config.dataset_config
    if dataset.valid_data_path and not dataset.train_data_path:
        raise text_corpus.CorpusError(
            "valid_data_path (--valid-data-path) is given without train_data_path "
            "(--train-data-path): name both, or let --data-path hold a part out."
        )
    if dataset.train_data_path:
        training = text_corpus.text_documents(dataset.train_data_path)
        validation = text_corpus.text_documents(dataset.valid_data_path) if dataset.valid_data_path else []
    elif dataset.data_path:
        training, validation = text_corpus.hold_out(text_corpus.text_documents(dataset.data_path))
    else:
        training, validation = text_corpus.hold_out(text_corpus.standard_library_documents())
    folder = dataset.data_cache_path or os.path.join(all_config.training_config.output_dir, "corpus")
    vocab_size = min(dataset.vocab_size or LARGEST_VOCABULARY, all_config.model_config.vocab_size)
    corpus = text_corpus.build_text_corpus(folder, training, validation, vocab_size)
    if len(corpus.train_tokens) <= all_config.model_config.seq_length:
        raise text_corpus.CorpusError(
            f"the training text has {len(corpus.train_tokens)} tokens, fewer than one sample of "
            f"seq_length {all_config.model_config.seq_length} needs: give more text."
        )
    return corpus


def make_datasets_provider(all_config, corpora):
    """`train_valid_test_datasets_provider` of a text: ((train, valid, test) numbers of samples) -> three datasets.

    Args:
        all_config (AllConfig): names the text.
        corpora (list): takes the TextCorpus.
    """

    def train_valid_test_datasets_provider(train_val_test_num_samples):
        from mindspeed_ms.training.utils import print_rank_0

        del train_val_test_num_samples  # a pass over the text is followed by the next one, as often as needed
        corpus = build_corpus(all_config)
        print_rank_0(corpus.summary())
        corpora.append(corpus)
        settings, length = all_config.dataset_config, all_config.model_config.seq_length
        reset = settings.reset_position_ids, settings.reset_attention_mask, settings.eod_mask_loss
        train, valid = (
            TokenDataset(tokens, length, corpus.end_of_document, *reset) if len(tokens) > length else None
            for tokens in (corpus.train_tokens, corpus.valid_tokens)
        )
        return train, valid, None

    return train_valid_test_datasets_provider


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


def prepare(all_config):
    """Find mistakes and build the corpus before any rank starts. Returns the number of ranks."""
    world_size = check_start(all_config)
    if gpt_datasets.names_indexed_files(all_config):
        gpt_datasets.check_files(all_config)
    else:
        build_corpus(all_config)
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

    corpora = []
    provider = make_datasets_provider(all_config, corpora)
    if gpt_datasets.names_indexed_files(all_config):
        provider = gpt_datasets.train_valid_test_datasets_provider

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
    report(trainer, *(corpora or [None]), with_sample=not args.no_sample)


if __name__ == "__main__":
    setup_logging()
    with in_one_line():
        main()
