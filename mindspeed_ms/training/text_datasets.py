"""Datasets of plain text, as a configuration names it: files and folders, or Python's standard library."""

import os

from mindspeed_ms.config import spelled
from mindspeed_ms.core.datasets.text_corpus import TOKENIZER_FILE, build_text_corpus
from mindspeed_ms.core.datasets.text_documents import (
    CorpusError,
    hold_out,
    split_text,
    standard_library_documents,
    text_documents,
)
from mindspeed_ms.core.datasets.token_dataset import TokenDataset
from mindspeed_ms.core.datasets.tokenizer import TokenizerSettings, build_tokenizer
from mindspeed_ms.core.dist_checkpointing.durable import replace_file
from mindspeed_ms.core.launch_environment import launch_environment
from mindspeed_ms.core.logging import logger
from mindspeed_ms.layout.vocabulary import true_vocab_size
from mindspeed_ms.training import gpt_datasets, same_data

LARGEST_VOCABULARY = 32_768  # of the BPE that is trained here; the model may have more rows
_D = "dataset_config"
_OWN = ("train_data_path", "valid_data_path", "test_data_path")


class TextDatasets:
    """`train_valid_test_datasets_provider` of the text that a configuration names.

    The text is cut into tokens by the tokenizer of the configuration, or by a byte-level BPE that is trained on it. `split`
    cuts its documents into training, validation and test; without it every tenth document is held out for validation.

    Args:
        all_config (AllConfig): names the text.

    Attributes:
        corpus (TextCorpus): the encoded text; built on first use, then found again in `data_cache_path` or output_dir/corpus.
    """

    def __init__(self, all_config):
        self.all_config = all_config
        self._corpus = None

    def __call__(self, train_val_test_num_samples):
        """Three datasets (training, validation, test), each as long as one pass: the next one follows as often as needed.

        Args:
            train_val_test_num_samples (tuple[int, int, int]): what needs no samples is None.
        """
        corpus, settings = self.corpus, self.all_config.dataset_config
        logger.info("%s", corpus.summary())
        self._keep_tokenizer()
        counts = gpt_datasets.used(self.all_config, train_val_test_num_samples)
        self.check()
        reset = settings.reset_position_ids, settings.reset_attention_mask, settings.eod_mask_loss
        reset = *reset, gpt_datasets.takes_intervals(self.all_config)
        length = self.all_config.model_config.seq_length
        return tuple(
            TokenDataset(tokens, length, corpus.end_of_document, *reset) if len(tokens) and (count or not place) else None
            for place, (tokens, count) in enumerate(zip(self._parts(), counts))
        )

    @property
    def corpus(self):
        """The encoded text.

        Raises:
            FileNotFoundError, CorpusError, TokenizerError: the text or the tokenizer is missing, or cannot be used.
        """
        if self._corpus is None:
            self._corpus = _build(self.all_config)
        return self._corpus

    def check(self):
        """Check that each part that is used fills a micro-batch of all data-parallel ranks.

        Raises:
            CorpusError: one is too small.
        """
        settings, length = self.all_config.dataset_config, self.all_config.model_config.seq_length
        size = self.all_config.parallel_config.data_parallel_size or 1
        unit = settings.batch_size * size if settings.drop_remainder else 1
        evaluates = gpt_datasets.evaluates(self.all_config)
        for name, tokens in zip(("training", "held-out", "test"), self._parts()):
            count = max(len(tokens) - 1, 0) // length
            if count >= unit or (name != "training" and not (evaluates and len(tokens))):
                continue
            spelling = [spelled(self.all_config, path) for path in (f"{_D}.batch_size", "model_config.seq_length")]
            advice = "" if name == "training" else ", or evaluate nothing (--eval-iters 0)"
            raise CorpusError(
                f"the {name} part of the text has {len(tokens)} tokens: {count} samples of seq_length {length}, fewer than one "
                f"micro-batch on every data-parallel rank ({settings.batch_size} x {size}) takes. Give more text, a smaller "
                f"{spelling[0]} or {spelling[1]}, another share (--split){advice}."
            )

    def fingerprint(self, all_config=None):
        """Fingerprint of tokenizer and data, see `same_data`."""
        all_config = all_config or self.all_config
        settings, corpus = all_config.dataset_config, self.corpus
        parts = []
        for name, part in corpus.fingerprints().items():
            of = f"{name}_data_path" if settings.train_data_path else "data_path"
            path = " ".join(getattr(settings, of) or ["Python's standard library"])
            parts.append({"of": of, "path": f"the {name} part of {path}", **part})
        return same_data.fingerprint(all_config, "text", parts, settings.split, corpus.tokenizer)

    def _keep_tokenizer(self):
        """Copy the BPE that was trained on the text into output_dir, where whoever uses the checkpoints looks for it."""
        own = os.path.join(self.corpus.folder, TOKENIZER_FILE)
        if not os.path.isfile(own) or launch_environment().rank != 0:
            return
        with open(own, "rb") as file:
            content = file.read()
        folder = self.all_config.training_config.output_dir
        os.makedirs(folder, exist_ok=True)
        replace_file(os.path.join(folder, TOKENIZER_FILE), content)

    def _parts(self):
        return self.corpus.train_tokens, self.corpus.valid_tokens, self.corpus.test_tokens


def _build(all_config):
    settings = all_config.dataset_config
    tokenizer = build_tokenizer(settings) if TokenizerSettings.from_config(settings).is_given else None
    _check_settings(all_config)
    if tokenizer is not None:
        _check_vocabulary(all_config, tokenizer)
    else:
        same_data.check_trained_here(all_config)
    folder = settings.data_cache_path or os.path.join(all_config.training_config.output_dir, "corpus")
    vocab_size = min(settings.vocab_size or LARGEST_VOCABULARY, all_config.model_config.vocab_size)
    training, validation, test = _documents(settings)
    corpus = build_text_corpus(folder, training, validation, vocab_size, test, tokenizer)
    _check_end(all_config, corpus)
    return corpus


def _documents(settings):
    """(training, validation, test) documents, each a list of names and texts."""
    if settings.train_data_path:
        return [text_documents(getattr(settings, name) or []) if getattr(settings, name) else [] for name in _OWN]
    documents = text_documents(settings.data_path) if settings.data_path else standard_library_documents()
    return split_text(documents, settings.split) if settings.split else (*hold_out(documents), [])


def _check_settings(all_config):
    settings = all_config.dataset_config
    for name in _OWN[1:]:
        if getattr(settings, name) and not settings.train_data_path:
            raise CorpusError(
                f"{name} (--{name.replace('_', '-')}) is given without train_data_path (--train-data-path): name both, or let "
                "--data-path hold a part out."
            )
    gpt_datasets.check_masks(settings)
    if settings.pad_token_id is not None:
        raise CorpusError(
            f"{spelled(all_config, f'{_D}.pad_token_id')} is {settings.pad_token_id}: samples of plain text are cut from one "
            "row of tokens and have no padding. Leave it out."
        )


def _check_vocabulary(all_config, tokenizer):
    settings, needed = all_config.dataset_config, tokenizer.vocab_size
    sizes = [("model_config.vocab_size", all_config.model_config.vocab_size, needed)]
    if settings.vocab_size:
        extra = true_vocab_size(0, settings.vocab_extra_ids, settings.tokenizer_type)
        sizes.append((f"{_D}.vocab_size", settings.vocab_size, needed - extra))
    for path, size, least in sizes:
        if size < least:
            raise CorpusError(
                f"{tokenizer.name} has {needed} ids, but {spelled(all_config, path)} is {size}: set it to {least} or more, or "
                "name another tokenizer."
            )


def _check_end(all_config, corpus):
    path = f"{_D}.eos_token_id"
    settings, given = all_config.settings, all_config.dataset_config.eos_token_id
    if settings is not None and settings.was_set(path) and given != corpus.end_of_document:
        raise CorpusError(
            f"{spelled(all_config, path)} is {given}, but {corpus.tokenizer.name} ends documents with "
            f"{corpus.end_of_document}: leave it out, or name another tokenizer."
        )
