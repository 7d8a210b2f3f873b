"""Reference: log-probabilities of the reference model, computed once by the model that is trained, and kept in a file.

    reference_log_probs.npz in output_dir: "about", JSON {"weights": fingerprint, "path": folder}, and for each data set
    "HASH/chosen", "HASH/rejected": float32 by the number of the stored pair, NaN where it was not computed.

A run that continues, in any layout, reads the file. What is missing there (more pairs than before) is computed from the folder
of the reference, if its weights are still the same.
"""

import json
import os
import zipfile
import zlib
from functools import partial

import numpy as np

from mindspeed_ms.config import spelled
from mindspeed_ms.config.model_description import describe_model, vocab_size_of
from mindspeed_ms.core import comm, parallel_state
from mindspeed_ms.core import num_microbatches_calculator as calculator
from mindspeed_ms.core.datasets.fingerprint import hash_of, of_indexed_files, sampled_hash
from mindspeed_ms.core.datasets.instruction_files import field_prefix
from mindspeed_ms.core.dist_checkpointing.agreement import on_rank_zero
from mindspeed_ms.core.dist_checkpointing.durable import replacing
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.folders import newest_manifest
from mindspeed_ms.core.dist_checkpointing.load import find_checkpoint, open_checkpoint
from mindspeed_ms.core.logging import logger
from mindspeed_ms.core.pipeline_parallel import get_forward_backward_func
from mindspeed_ms.core.tensor_parallel.lora import adapters_switched_off
from mindspeed_ms.models.adapters import has_adapters, has_base, without_adapters
from mindspeed_ms.models.hugging_face.folder import CONFIG_FILE, has_weights
from mindspeed_ms.models.reward_head import without_critic
from mindspeed_ms.tasks.posttrain.pairwise import REFERENCE
from mindspeed_ms.tasks.posttrain.sequences import log_probabilities
from mindspeed_ms.training import checkpointing
from mindspeed_ms.training.data_streams import to_tensor
from mindspeed_ms.training.start_checks import check_resumed

FILE = "reference_log_probs.npz"
_KINDS = ("chosen", "rejected")
_OF_MODELS = (CONFIG_FILE, ".safetensors", ".bin", ".index.json")
_DOING = "the reference's log-probabilities cannot be computed"


class MissingReferenceError(CheckpointError):
    """Error: there are no weights of a reference model, or other ones than the log-probabilities are of."""


def check_reference(all_config):
    """Check the reference model that `ref_model` names, before anything is built.

    Raises:
        MissingReferenceError: there is none, or one of another model.
    """
    folder = all_config.training_config.ref_model
    if not folder:
        return
    option = spelled(all_config, "training_config.ref_model")
    if not os.path.isdir(folder):
        raise MissingReferenceError(f"{option} is {folder}: there is no such folder.")
    try:
        path, manifest = newest_manifest(folder, None, all_config)
        _usable(path, manifest, all_config)
    except CheckpointError as error:
        raise MissingReferenceError(f"{option} is {folder}: {error}") from error


def _usable(path, manifest, all_config):
    """The Manifest of a reference without what the reference has no use for.

    Raises:
        CheckpointError: it is of another model, or holds adapters that cannot be switched off.
    """
    if has_adapters(manifest):
        if not all_config.lora_config.use_lora or not has_base(manifest):
            raise CheckpointError(
                f"the reference {path} holds adapters: merge them first: python -m mindspeed_ms.tools.lora merge."
            )
        manifest = without_adapters(manifest)
    if not describe_model(all_config).has_critic:
        manifest = without_critic(manifest)
    check_resumed(path, manifest, all_config, resumes=False, is_gpt=True)
    return manifest


class Reference:
    """Reference log-probabilities of the pairs of a run.

    Args:
        trainer (PairwiseTrainer): initialised.
    """

    def __init__(self, trainer):
        self.trainer, self.run = trainer, trainer.trainer
        self.all_config, self.settings = trainer.all_config, trainer.all_config.training_config
        self._is_own = False  # whether the file that was read is the one that is written
        self.datasets = [one for one in trainer.train_valid_test_datasets_provider.datasets if one is not None]

    def prepare(self):
        """Give every data set its log-probabilities (`beside`), from the file or computed and written there; on all ranks.

        Raises:
            MissingReferenceError: they have to be computed, and the weights are not there.
            CheckpointError: weights of another model.
        """
        start = self.run.checkpoints.start
        about, arrays = on_rank_zero(_DOING, self._read, start)
        path = self._path(start, about)
        weights = about and about["weights"]
        if path is not None:
            weights = on_rank_zero(_DOING, self._fingerprint, path)
        if about is not None and about["weights"] != weights:
            if start.resumes:
                raise MissingReferenceError(
                    f"{FILE} of this run is of another reference model than {path}: name the one that the training started with"
                    f"{' (' + about['path'] + ')' if about['path'] else ''} with --ref-model."
                )
            arrays = {}
        missing = []
        for dataset in self.datasets:
            key = self._key(dataset)
            known = arrays.setdefault(key, np.full((2, len(dataset.files)), np.nan, np.float32))
            numbers = dataset.used_indices()
            numbers = numbers[np.isnan(known[0][numbers])]
            if len(numbers):
                missing.append((key, dataset, numbers))
        if missing:
            self._compute(path, about, arrays, missing)
        if comm.get_rank() == 0 and (missing or not self._is_own):
            self._write({"weights": weights, "path": os.path.abspath(path) if path else about["path"]}, arrays)
        for dataset in self.datasets:
            dataset.beside = dict(zip(REFERENCE, arrays[self._key(dataset)]))

    # ---- weights ------------------------------------------------------------------------------------------------------

    def _path(self, start, about):
        """Folder of the reference's weights; None: the file knows them, and they are not needed or not there."""
        if self.settings.ref_model:
            return find_checkpoint(self.settings.ref_model, None, self.settings.crc_check, self.all_config)
        if not start.resumes:
            return start.adapters.base or start.path
        if self.settings.pretrained_checkpoint and about is None:
            return find_checkpoint(self.settings.pretrained_checkpoint, None, self.settings.crc_check, self.all_config)
        return None

    def _fingerprint(self, path):
        """Hash of the files of a checkpoint, and of the precision that it is computed in. Of a Hugging Face folder model and
        weights count: trainings and further files may lie in it."""
        names = [os.path.relpath(os.path.join(place, name), path) for place, _, files in os.walk(path) for name in files]
        if CONFIG_FILE in names and has_weights(path):
            names = [name for name in names if name == os.path.basename(name) and name.endswith(_OF_MODELS)]
        names = sorted(names)
        files = [item for name in names for item in (name, sampled_hash(os.path.join(path, name)))]
        return hash_of(*files, self.all_config.model_config.compute_dtype, self.all_config.model_config.params_dtype)

    def _load(self, path):
        """Fill the model with the reference's weights; adapters stay."""
        with open_checkpoint(path, self.all_config) as reader:
            reader.manifest = _usable(path, reader.manifest, self.all_config)
            checkpointing.load_checkpoint(reader, self.run.model, None, None, True, vocab_size_of(self.all_config))

    # ---- log-probabilities --------------------------------------------------------------------------------------------

    def _compute(self, path, about, arrays, missing):
        count = sum(len(numbers) for *_, numbers in missing)
        if path is None:
            path = about and about["path"]
            if not path or not os.path.isdir(path):
                raise MissingReferenceError(
                    f"{count} pairs have no log-probabilities of the reference model "
                    f"yet, and its weights are not there{f' ({path})' if path else ''}: name them with --ref-model."
                )
            if about is not None and on_rank_zero(_DOING, self._fingerprint, path) != about["weights"]:
                raise MissingReferenceError(
                    f"the weights in {path} have changed since the training started: name the reference model with --ref-model."
                )
        self._load(path)
        if comm.get_rank() == 0:
            logger.info("log-probabilities of %d pairs by the reference model %s", count, path)
        for chunk in self.run.model:
            chunk.set_train(False)
        with adapters_switched_off(chunk.module for chunk in self.run.model):
            for key, dataset, numbers in missing:
                self._forward(dataset, numbers, arrays[key])

    def _forward(self, dataset, numbers, known):
        """Fill in the log-probabilities of stored pairs, in steps of a global batch; the last one is filled up."""
        dataset.beside = {}
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        found = []
        with calculator.full_batch_size():
            count, rows = calculator.get_num_microbatches(), calculator.get_micro_batch_size()
            unit = count * rows * size
            for start in range(0, len(numbers), unit):
                own = np.resize(numbers[start : start + unit], (count, size, rows))[:, rank]
                batches = [{name: to_tensor(value) for name, value in dataset.stored_batch(row).items()} for row in own]
                outputs = get_forward_backward_func()(
                    forward_step_func=self._step,
                    data_iterator=iter(batches),
                    model=self.run.model,
                    num_microbatches=count,
                    forward_only=True,
                    collect_non_loss_data=True,
                )
                found += [(row, output.asnumpy().reshape(2, -1)) for row, output in zip(own, outputs)]
        for pairs in comm.world_group().all_gather_object(found if self._speaks() else []):
            for row, values in pairs:
                known[:, row] = values

    @staticmethod
    def _speaks():
        """Whether the results of this rank count: the first of those that have the same."""
        return parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0

    def _step(self, data_iterator, model):
        tokens, labels, loss_mask, attention_mask, position_ids, _ = self.trainer.get_batch(data_iterator)
        output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
        return output, partial(_summed, loss_mask)

    # ---- file ---------------------------------------------------------------------------------------------------------

    def _key(self, dataset):
        prefixes = [field_prefix(dataset.files.path_prefix, field) for field in dataset.fields]
        return hash_of(*(of_indexed_files(prefix)["hash"] for prefix in prefixes), dataset.sequence_length)

    def _read(self, start):
        """(about, arrays) of the file of this run, or of the one that it continues; (None, {}) without one."""
        for folder in self._places(start):
            path = os.path.join(folder, FILE)
            if os.path.isfile(path):
                arrays, self._is_own = read_arrays(path), folder == self.settings.output_dir
                try:
                    about = json.loads(str(arrays.pop("about")))
                    keys = {name.partition("/")[0] for name in arrays}
                    return about, {key: np.stack([arrays[f"{key}/{kind}"] for kind in _KINDS]) for key in keys}
                except (ValueError, KeyError) as error:
                    raise _damaged(path, error) from error
        return None, {}

    def _places(self, start):
        """Folders of files about this run's reference: what a continued run began with goes before what lies in its folder."""
        own = self.settings.output_dir
        return [os.path.dirname(start.path), start.path, own] if start.resumes else [own]

    def _write(self, about, arrays):
        os.makedirs(self.settings.output_dir, exist_ok=True)
        path = os.path.join(self.settings.output_dir, FILE)
        named = {f"{key}/{kind}": values for key, pair in arrays.items() for kind, values in zip(_KINDS, pair)}
        with replacing(path) as file:
            np.savez(file, about=json.dumps(about), **named)


def read_arrays(path):
    """Arrays of a .npz file by name.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise _damaged(path, error) from error


def _damaged(path, error):
    return CheckpointError(f"{path} is damaged ({error}): remove it, to compute it again.")


def _summed(loss_mask, output, non_loss_data=False):
    del non_loss_data
    return log_probabilities(output, loss_mask)[0]
