"""BaseTrainer: a stage of post-training on the parts of pretraining. Source of names: MindSpeed-LLM."""

from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain

from mindspeed_ms.config import require_startable
from mindspeed_ms.core.context_parallel import get_batch_on_this_cp_rank
from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import MicroBatchLoss
from mindspeed_ms.core.tensor_parallel.mappings import reduce_from_context_parallel_region
from mindspeed_ms.legacy.model.gpt_model import GPTModel
from mindspeed_ms.legacy.model.loss_func import TokenLosses
from mindspeed_ms.tasks.posttrain.datasets import StageDatasets
from mindspeed_ms.tasks.posttrain.stages import StageError
from mindspeed_ms.training.checkpointing import check_output_folder
from mindspeed_ms.training.initialize import get_all_config, get_args, has_args
from mindspeed_ms.training.losses import count_tokens
from mindspeed_ms.training.tensorboard import require_tensorboard
from mindspeed_ms.training.timers import get_timers
from mindspeed_ms.training.training import build_trainer, training_run


class BaseTrainer(ABC):
    """A stage of post-training: model, batches, loss and loop. A subclass may override any public method.

    Args:
        process_non_loss_data_func (Optional[Callable]): see `pretrain`.

    Attributes:
        stage (str): that the class trains.
        args (Optional[argparse.Namespace]): the command line.
        all_config (AllConfig): the configuration.
        timers (Timers): see `get_timers`.
        train_valid_test_datasets_provider (Callable): datasets of the run.
        trainer (Trainer): the loop and its parts, after `initialize`.
        train_args (tuple): forward step, model, optimizer, schedule, training and validation data, process_non_loss_data_func,
            configuration.

    Raises:
        StageError, ConfigError, DatasetError, CheckpointError: what is wrong, before the model is built.
    """

    stage = ""

    def __init__(self, process_non_loss_data_func=None):
        self.args = get_args() if has_args() else None
        self.all_config = get_all_config()
        self.timers = get_timers()
        self.process_non_loss_data_func = process_non_loss_data_func
        self.train_args = None
        self.model_type = None
        self.test_data_iterator_list = None
        self.trainer = None
        self._run = ExitStack()
        self._check_stage()
        self.train_valid_test_datasets_provider = StageDatasets(self.all_config)
        self.initialize()

    def _check_stage(self):
        stage = self.all_config.training_config.stage
        if stage != self.stage:
            found = "not given" if stage is None else repr(stage)
            raise StageError(f"stage (--stage) is {found}: {type(self).__name__} trains stage {self.stage}.")
        require_startable(self.all_config)
        require_tensorboard(self.all_config.training_config)

    def initialize(self):
        """Start device and ranks, read the data, build model, optimizer and the other parts: `train_args`, `trainer`."""
        self._run.enter_context(training_run(self.all_config))
        settings = self.all_config.training_config
        try:
            check_output_folder(settings.output_dir, settings.save_enabled and not settings.skip_train, makes=False)
            self.train_valid_test_datasets_provider.prepare()
            self.trainer = build_trainer(
                self.all_config,
                self.model_provider,
                self.train_valid_test_datasets_provider,
                self._forward_step,
                self.process_non_loss_data_func,
                transforms=(self.transform,),
                reads_ahead=True,
            )
        except BaseException:
            self._run.close()
            raise
        parts = self.trainer
        self.train_args = (
            *(self.forward_step, parts.model, parts.optimizer, parts.opt_param_scheduler, parts.data.train, parts.data.valid),
            *(self.process_non_loss_data_func, self.all_config),
        )

    def model_provider(self, pre_process=True, post_process=True):
        """This rank's chunk of the model (GPTModel). A subclass may return its own cell, or change this one.

        Args:
            pre_process, post_process (bool): the chunk starts, ends the model.
        """
        return GPTModel(self.all_config.model_config, pre_process=pre_process, post_process=post_process)

    @staticmethod
    def transform(cell):
        """Let a chunk of the model give the losses of its tokens `[b, s]`, which `loss_func` takes."""
        if getattr(cell, "loss", None) is not None and not isinstance(cell.loss, TokenLosses):
            cell.loss = TokenLosses(cell.loss.loss_func, label_smoothing=cell.loss.label_smoothing)
        return cell

    @staticmethod
    @abstractmethod
    def get_batch(data_iterator):
        """This rank's part of the next micro-batch: (tokens, labels, loss_mask, attention_mask, position_ids), `[b, s]`."""

    @staticmethod
    @abstractmethod
    def loss_func(input_tensor, output_tensor):
        """Loss of a micro-batch: a MicroBatchLoss, `(loss, reported)` with a mean, or `(sum, number of tokens, reported)`.

        Args:
            input_tensor (Tensor): loss mask `[b, s]`.
            output_tensor (Tensor): what the model gave: losses of the tokens `[b, s]`.
        """

    @abstractmethod
    def forward_step(self, data_iterator, model):
        """Forward of a micro-batch: (output, loss_func), `loss_func(output)` is its loss."""

    def _forward_step(self, data_iterator, model):
        """`forward_step` whose loss is a MicroBatchLoss in the normalisation of the run."""
        batch = next(data_iterator)
        output, loss_func = self.forward_step(chain([batch], data_iterator), model)
        return output, partial(self._loss, loss_func, batch)

    def _loss(self, loss_func, batch, output, non_loss_data=False):
        if non_loss_data:
            return output
        loss = MicroBatchLoss.of(loss_func(output))
        if loss.tokens is not None or not self.all_config.training_config.calculate_per_token_loss:
            return loss
        # the loss is one over the tokens of the global batch: of a mean the sum over its tokens
        tokens = count_tokens(get_batch_on_this_cp_rank({"loss_mask": batch["loss_mask"]}))
        return replace(loss, differentiated=loss.differentiated * reduce_from_context_parallel_region(tokens), tokens=tokens)

    def before_training(self):  # noqa: B027  most stages need nothing
        """Called between `initialize` and the first step, before the starting checkpoint is loaded."""

    def train(self):
        """Train to the end, with evaluations and checkpoints; returns the `training.Trainer`."""
        try:
            self.before_training()
            self.trainer.run()
        finally:
            self._run.close()
        return self.trainer
