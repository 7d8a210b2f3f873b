"""Datasets of a stage of post-training: prepared files, or raw records that are prepared here."""

from mindspeed_ms.config.sections.posttrain import ROLLOUT_STAGES
from mindspeed_ms.core import comm
from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.datasets.instruction_checks import check_samples
from mindspeed_ms.core.datasets.tokenizer import TokenizerError
from mindspeed_ms.core.datasets.tokenizer.chat_template import TemplateError
from mindspeed_ms.tasks.posttrain.raw_data import prepare_raw_data
from mindspeed_ms.tasks.preprocess.errors import PreprocessError
from mindspeed_ms.training import gpt_datasets

_MISTAKES = (DatasetError, PreprocessError, TokenizerError, TemplateError, OSError)


class StageDatasets:
    """Datasets provider (see `pretrain`) of a run.

    Args:
        all_config (AllConfig): of the run.

    Attributes:
        datasets (Optional[tuple]): training, validation and test data, once they are built; None where there is no data.
    """

    def __init__(self, all_config):
        self.all_config = all_config
        self.datasets = None

    def prepare(self):
        """Prepare raw records and check the data, before anything is built; rank 0 does it, all ranks call.

        Raises:
            DatasetError: on all ranks, what is wrong.
        """
        prefixes, text = comm.of_rank_zero("prepares and checks the data", self._prepare)
        if text is not None:
            raise DatasetError(text)
        self.all_config.dataset_config.fill(**prefixes)

    def _prepare(self):
        """(paths of what was prepared by setting, None), or (None, what is wrong)."""
        try:
            prefixes = prepare_raw_data(self.all_config)
            self.all_config.dataset_config.fill(**prefixes)
            gpt_datasets.check_files(self.all_config)
            check_samples(self.all_config)
        except _MISTAKES as error:
            return None, str(error)
        return prefixes, None

    def fingerprint(self):
        """Fingerprint of tokenizer and data, see `same_data`."""
        return gpt_datasets.fingerprint(self.all_config)

    samples_per_epoch = staticmethod(gpt_datasets.samples_per_epoch)

    def __call__(self, train_val_test_num_samples):
        """Build the datasets."""
        used = gpt_datasets.used(self.all_config, train_val_test_num_samples)
        if self.all_config.training_config.stage in ROLLOUT_STAGES:
            used = used[0], 0, 0
        self.datasets = gpt_datasets.build_datasets(self.all_config, used)
        return self.datasets
