"""Rollouts: answers that the model that is trained generates, their rewards, and the micro-batches made of them."""

import os
from dataclasses import astuple

import numpy as np

from mindspeed_ms.config.model_description import describe_model, vocab_size_of
from mindspeed_ms.core import comm, parallel_state
from mindspeed_ms.core.datasets.instruction_builder import pad_token_id
from mindspeed_ms.core.datasets.tokenizer import TokenizerError, TokenizerSettings, build_tokenizer
from mindspeed_ms.core.dist_checkpointing import folders
from mindspeed_ms.core.dist_checkpointing.agreement import attempt
from mindspeed_ms.core.dist_checkpointing.durable import replacing
from mindspeed_ms.core.logging import logger
from mindspeed_ms.inference.engine import STOP, Engine
from mindspeed_ms.inference.model_runner import ModelRunner
from mindspeed_ms.inference.sampling import SamplingParams
from mindspeed_ms.tasks.posttrain.reference import read_arrays
from mindspeed_ms.tasks.posttrain.rewards import RewardError
from mindspeed_ms.tasks.posttrain.rollout_forward import micro_batch_of

FOLDER = "rollouts"
_PLAN = "plan"  # in a file, beside the arrays of the answers
_SLOTS = 64
"""Answers that are generated at the same time."""


class OwnRunner(ModelRunner):
    """ModelRunner of a data-parallel rank that generates for itself."""

    def _from_last_stage(self, parts, shape, dtype):
        group = parallel_state.get_pipeline_model_parallel_group()
        array = np.concatenate(parts) if parts else np.zeros(shape, dtype)
        return group.all_gather_object(array if parts else None)[-1] if group.size > 1 else array


class Sampler:
    """Generation by the model that is trained, in its own layout.

    Data-parallel ranks share the prompts, unless they also share experts: then all generate everything.

    Args:
        all_config (AllConfig): of the run.
        model (list[ShardedModel]): this rank's chunks.
    """

    def __init__(self, all_config, model):
        self.all_config, self.settings, self.model = all_config, all_config.training_config, model
        dataset = all_config.dataset_config
        given = TokenizerSettings.from_config(dataset)
        self.tokenizer = build_tokenizer(dataset) if given.is_given else None
        self.end = self._end_id(dataset)
        self._shares = all_config.parallel_config.expert_model_parallel_size == 1

    def _end_id(self, dataset):
        try:
            found = None if self.tokenizer is None else self.tokenizer.eod
        except TokenizerError:
            found = None
        return dataset.eos_token_id if found is None else found

    def generate(self, prompts, first, count):
        """Answers to prompts.

        Args:
            prompts (list[tuple[int, ...]]): ids.
            first (int): number of the first prompt in the training: with the seed it decides what is drawn.
            count (int): answers to each.

        Returns:
            list[tuple]: (ids, text or None, whether it has ended by itself) of each answer; the same on every rank.
        """
        size = parallel_state.get_data_parallel_world_size() if self._shares else 1
        rank = parallel_state.get_data_parallel_rank() if self._shares else 0
        own = list(range(len(prompts)))[rank::size]
        found = {}
        if own:
            runner = (OwnRunner if self._shares else ModelRunner)(
                self.model,
                describe_model(self.all_config),
                vocab_size_of(self.all_config),
                self.all_config.model_config.seq_length,
                min(_SLOTS, len(own) * count),
            )
            engine = Engine(runner, self.tokenizer, (self.end,))
            params = [self._params(first + number, count) for number in own]
            answers = engine.generate([prompts[number] for number in own], params)
            for place, answer in enumerate(answers):
                text = None if self.tokenizer is None else answer.text
                found[own[place // count], answer.sample] = answer.token_ids, text, answer.finish_reason == STOP
        if size > 1:
            group = parallel_state.get_data_parallel_group()
            found = {key: value for part in group.all_gather_object(found) for key, value in part.items()}
        return [found[number, sample] for number in range(len(prompts)) for sample in range(count)]

    def _params(self, number, count):
        settings = self.settings
        seed = int(np.random.SeedSequence([settings.random_seed, number]).generate_state(1, np.uint64)[0])
        return SamplingParams(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seed=seed,
            n=count,
        )


class Rollouts:
    """Data of a training on rewards (DataPart): the micro-batches of a step, from the rollout that it learns from.

    A rollout is arrays by name, a row for each answer: `tokens`, `labels`, `loss_mask` `[n, s]`, `rewards`, `lengths` `[n]` and
    what the stage adds. One that serves several steps is kept in output_dir/rollouts, from which a resumed run reads it.

    Args:
        trainer (BaseTrainer): initialised; its `complete(rollout)` adds what the stage needs.
        reward (RewardFunction | RewardModel): of the answers; a function is used on rank 0.
    """

    def __init__(self, trainer, reward):
        self.trainer, self.reward, self.data = trainer, reward, trainer.trainer.data
        self.all_config, self.settings = trainer.all_config, trainer.all_config.training_config
        self.prompts = trainer.train_valid_test_datasets_provider.datasets[0]
        self.plan = self.prompts.plan
        self.sampler = Sampler(self.all_config, trainer.trainer.model)
        self.pad = pad_token_id(self.all_config.dataset_config)
        self.number, self.rollout = None, None

    @property
    def epoch(self):
        """See DataPart."""
        return self.data.epoch

    def of_step(self):
        """See DataPart."""
        rows = [batch["answer"].asnumpy() for batch in self.data.of_step()]
        number = int(rows[0][0]) // self.plan.size
        if number != self.number:
            self.rollout = self._read(number)
            if self.rollout is None:
                self.rollout = self._make(number)
            self._write(number)
            self.number = number
        return iter([micro_batch_of(self.rollout, one - number * self.plan.size) for one in rows])

    # ---- making one ---------------------------------------------------------------------------------------------------

    def _make(self, number):
        group = self.plan.group
        first = number * self.plan.size // group
        numbers = range(first, first + self.plan.size // group)
        prompts = [self.prompts.prompt(one) for one in numbers]
        answers = self.sampler.generate(prompts, first, group)
        rollout = self._arrays([prompt for prompt in prompts for _ in range(group)], answers)
        rollout["rewards"] = self._rewards([one for one in numbers for _ in range(group)], answers, rollout)
        self.trainer.complete(rollout)
        return rollout

    def _arrays(self, prompts, answers):
        shape = len(answers), self.all_config.model_config.seq_length
        tokens, labels = np.full(shape, self.pad, np.int32), np.zeros(shape, np.int32)
        mask, lengths = np.zeros(shape, np.float32), np.array([len(answer[0]) for answer in answers], np.float32)
        for row, (prompt, (ids, *_)) in enumerate(zip(prompts, answers)):
            whole, before = [*prompt, *ids], len(prompt) - 1
            tokens[row, : len(whole)] = whole
            labels[row, before : before + len(ids)] = ids
            mask[row, before : before + len(ids)] = 1.0
        return {"tokens": tokens, "labels": labels, "loss_mask": mask, "lengths": lengths}

    def _rewards(self, numbers, answers, rollout):
        """Rewards float32 `[n]`, on every rank."""
        if hasattr(self.reward, "scores"):
            found = self.reward.scores(rollout, [self.prompts.place(number)[0] for number in numbers])
        else:
            found = self._by_function(numbers, answers)
        ended = np.array([one for *_, one in answers])
        return np.where(ended, found, found - self.settings.missing_eos_penalty).astype(np.float32)

    def _by_function(self, numbers, answers):
        """Rewards `[n]` by rank 0."""
        values, text = comm.of_rank_zero(f"calls the reward function {self.reward.name}", self._call, numbers, answers)
        if text is not None:
            raise RewardError(text)
        return np.array(values)

    def _call(self, numbers, answers):
        """(rewards, None), or (None, what is wrong)."""
        tokenizer = self.sampler.tokenizer
        places, records = zip(*(self.prompts.place(number) for number in numbers))
        prompts = [self.prompts.prompt(number) for number in numbers]
        try:
            found = self.reward(
                list(places),
                prompts=[None if tokenizer is None else tokenizer.detokenize(list(ids)) for ids in prompts],
                answers=[text for _, text, _ in answers],
                prompt_ids=[list(ids) for ids in prompts],
                answer_ids=[list(ids) for ids, *_ in answers],
                records=list(records),
            )
        except RewardError as error:
            return None, str(error)
        return found, None

    # ---- file ---------------------------------------------------------------------------------------------------------

    def _folder(self):
        return os.path.join(self.settings.output_dir, FOLDER)

    def _path(self, number):
        return os.path.join(self._folder(), f"rollout_{number:07d}.npz")

    def _read(self, number):
        """The rollout that a step in its middle goes on with; None at its beginning."""
        if self.trainer.trainer.train_state.iteration % self.plan.steps == 0:
            return None
        found, text = comm.of_rank_zero("reads the answers of a rollout", self._stored, number)
        if text is not None:
            logger.warning("%s: others are generated by the weights of now", text)
        return found

    def _stored(self, number):
        """(arrays of a rollout that was kept, None), or (None, why they cannot be used)."""
        places = [*self._of_checkpoint(), self._folder()]
        paths = [os.path.join(place, os.path.basename(self._path(number))) for place in places]
        path = next(filter(os.path.isfile, paths), None)
        if path is None:
            return None, f"the answers of rollout {number}, in whose middle this training goes on, are not in {places[0]}"
        found, text = attempt(read_arrays, path)
        if found is not None and not np.array_equal(found.pop(_PLAN, ()), astuple(self.plan)):
            return None, f"{path} holds answers for other sizes of batch, rollout, epochs or groups, or another seed"
        return found, text

    def _of_checkpoint(self):
        start = self.trainer.trainer.checkpoints.start
        return [os.path.join(os.path.dirname(start.path), FOLDER)] if start.resumes else []

    def _write(self, number):
        """Keep a rollout for several steps; those that no checkpoint needs are removed."""
        if comm.get_rank() or self.plan.steps == 1 or not self.settings.save_enabled:
            return
        os.makedirs(self._folder(), exist_ok=True)
        path = self._path(number)
        with replacing(path) as file:
            np.savez(file, **self.rollout, **{_PLAN: astuple(self.plan)})
        needed = {self._path(one) for one in {number, *self._numbers_of_checkpoints()}}
        for name in os.listdir(self._folder()):
            if os.path.join(self._folder(), name) not in needed:
                os.remove(os.path.join(self._folder(), name))

    def _numbers_of_checkpoints(self):
        places = self.settings.output_dir, folders.spare_folder(self.settings.output_dir)
        return {iteration // self.plan.steps for place in places for iteration in folders.iterations_in(place)}
