"""RolloutTrainer: what the stages have in common that learn from answers which they generate."""

from functools import partial

from mindspeed_ms.config import spelled
from mindspeed_ms.tasks.posttrain.base_trainer import BaseTrainer
from mindspeed_ms.tasks.posttrain.reference import check_reference
from mindspeed_ms.tasks.posttrain.reference_weights import ReferenceWeights
from mindspeed_ms.tasks.posttrain.reward_model import RewardModel, check_reward_model
from mindspeed_ms.tasks.posttrain.rewards import load_reward_function
from mindspeed_ms.tasks.posttrain.rollout import Rollouts
from mindspeed_ms.tasks.posttrain.rollout_forward import log_probabilities_of


class RolloutTrainer(BaseTrainer):
    """Learning from rewards of answers that the model generates.

    Attributes:
        divergence_option (str): field of training_config, the weight of the divergence from the reference.
        reference (Optional[ReferenceWeights]): None: that weight is 0.
    """

    divergence_option = ""
    reference = None

    def _check_stage(self):
        super()._check_stage()
        settings, name = self.all_config.training_config, spelled(self.all_config, "training_config.reward_function")
        if settings[self.divergence_option]:
            check_reference(self.all_config)
        if settings.reward_model:
            self._reward = check_reward_model(self.all_config)
        else:
            self._reward = load_reward_function(settings.reward_function, name)

    def initialize(self):
        """See BaseTrainer; the data are rollouts."""
        super().initialize()
        if self.all_config.training_config.reward_model:
            self._reward = RewardModel(self.all_config, self._reward)
        self.trainer.data = Rollouts(self, self._reward)

    @staticmethod
    def get_batch(data_iterator):
        """The next micro-batch: a dict of Tensors, see Rollouts, with `position_ids`."""
        return next(data_iterator)

    def forward_step(self, data_iterator, model):
        """See BaseTrainer; `loss_func` is given the micro-batch."""
        batch = self.get_batch(data_iterator)
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])
        return output, partial(self.loss_func, batch)

    def before_training(self):
        """Take the reference, where it is needed."""
        if self.all_config.training_config[self.divergence_option]:
            self.reference = ReferenceWeights(self)
            self.reference.prepare()

    def reference_log_probs(self, rollout):
        """Log-probabilities of a rollout's tokens by the reference, float32 `[n, s]`; on all ranks."""
        with self.reference.swapped_in():
            return log_probabilities_of(self, rollout)

    def complete(self, rollout):
        """Add to a rollout (dict of arrays) what the loss needs; on all ranks, with the weights that generated it."""
        raise NotImplementedError
