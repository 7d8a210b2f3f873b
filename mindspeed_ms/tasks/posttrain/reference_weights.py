"""ReferenceWeights: frozen reference model of PPO and GRPO: adapters off, or a second copy of the weights, swapped in."""

import json
import os
from contextlib import contextmanager

from mindspeed_ms.core import comm, storage
from mindspeed_ms.core.dist_checkpointing.agreement import on_rank_zero
from mindspeed_ms.core.dist_checkpointing.durable import replace_file
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.load import find_checkpoint
from mindspeed_ms.core.tensor_parallel.lora import adapters_switched_off
from mindspeed_ms.tasks.posttrain.reference import MissingReferenceError, Reference

FILE = "reference.json"
_DOING = "the reference model cannot be prepared"


class ReferenceWeights(Reference):
    """Reference model of a training on rewards: `ref_model`, else the weights that the training started from.

    With adapters and without `ref_model` it is the base, adapters off. Else every rank keeps a second copy of its weights.
    reference.json in output_dir says what it is, so that a run that continues takes the same.

    Args:
        trainer (BaseTrainer): initialised.
    """

    def __init__(self, trainer):
        super().__init__(trainer)
        self._is_base = self.all_config.lora_config.use_lora and not self.settings.ref_model
        self._kept = []

    def prepare(self):
        """Take the copy; before the starting checkpoint is loaded, on all ranks.

        Raises:
            MissingReferenceError: the weights are not there, or other ones than the training started with.
            CheckpointError: weights of another model.
        """
        if self._is_base:
            return
        start = self.run.checkpoints.start
        about = on_rank_zero(_DOING, self._read_about, start)
        path = self._named(start, about)
        weights = on_rank_zero(_DOING, self._fingerprint, path) if path else f"seed {self.settings.random_seed}"
        if about is not None and about["weights"] != weights:
            raise MissingReferenceError(
                f"{FILE} of this run is of another reference model than {path or weights}: name the one that the training "
                f"started with ({about['path'] or about['weights']})" + (" with --ref-model." if about["path"] else ".")
            )
        initial = self._copies()
        if path:
            self._load(path)
        self._kept = self._copies()
        for (parameter, _), values in zip(self._kept, (values for _, values in initial)):
            storage.write(parameter, values)
        if comm.get_rank() == 0:
            os.makedirs(self.settings.output_dir, exist_ok=True)
            file = os.path.join(self.settings.output_dir, FILE)
            about = {"weights": weights, "path": os.path.abspath(path) if path else None}
            replace_file(file, json.dumps(about).encode())

    @contextmanager
    def swapped_in(self):
        """Context manager: inside, the model is the reference; behind it the policy, bit for bit."""
        if self._is_base:
            with adapters_switched_off(chunk.module for chunk in self.run.model):
                yield
            return
        for chunk in self.run.model:
            chunk.finish_param_sync()
        self._exchange()
        try:
            with adapters_switched_off(chunk.module for chunk in self.run.model):
                yield
        finally:
            self._exchange()

    def _exchange(self):
        for number, (parameter, values) in enumerate(self._kept):
            now = _copy(parameter)
            storage.write(parameter, values)
            self._kept[number] = parameter, now

    def _copies(self):
        parameters = {id(one): one for chunk in self.run.model for one in chunk.module.get_parameters()}
        return [(parameter, _copy(parameter)) for parameter in parameters.values()]

    def _named(self, start, about):
        """Folder of the reference's weights; None: the initial random ones."""
        if self.settings.ref_model:
            return find_checkpoint(self.settings.ref_model, None, self.settings.crc_check, self.all_config)
        if about is not None:
            if about["path"] and not os.path.isdir(about["path"]):
                raise MissingReferenceError(
                    f"the weights that this training started from are not there ({about['path']}): name them with --ref-model."
                )
            return about["path"]
        if start.resumes:
            raise MissingReferenceError(
                f"there is no {FILE} beside {start.path}, which says what the training started from: name it with --ref-model."
            )
        return start.path

    def _read_about(self, start):
        if not start.resumes:
            return None
        for folder in self._places(start):
            path = os.path.join(folder, FILE)
            if os.path.isfile(path):
                try:
                    with open(path, encoding="utf-8") as file:
                        about = json.load(file)
                    return {name: about[name] for name in ("weights", "path")}
                except (ValueError, KeyError, TypeError) as error:
                    raise CheckpointError(
                        f"{path} is damaged ({error}): remove it, and name what this training started from with --ref-model."
                    ) from error
        return None


def _copy(parameter):
    """A Tensor of its own with the values of a parameter."""
    copy = storage.zeros(parameter.shape, parameter.dtype)
    storage.write(copy, parameter)
    return copy
