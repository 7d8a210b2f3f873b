"""Report at the end of gpt/pretrain_gpt.py: losses, entropies of the corpus, folders, and some text by the model."""

import json
import math
import os

import numpy as np
from mindspore import Tensor

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core import autograd, comm, parallel_state
from mindspeed_ms.core.context_parallel import whole_along
from mindspeed_ms.core.logging import logger
from mindspeed_ms.core.tensor_parallel import gather_from_tensor_model_parallel_region
from mindspeed_ms.inference.engine import Engine
from mindspeed_ms.inference.model_runner import ModelRunner
from mindspeed_ms.inference.sampling import SamplingParams
from mindspeed_ms.legacy.model.core_attention import has_explicit_band
from mindspeed_ms.training.metrics import LOSS_CURVE_FILE, METRICS_FILE, read_metrics

AVERAGED_STEPS = 20
PROMPT = "    def __init__(self, name, "  # for Python's own sources
PROMPT_TOKENS = 8  # of a held-out document, for other text
TEMPERATURE, TOP_K = 0.7, 12


def report(run, corpus, with_sample=True, sample_tokens=64):
    """Print the summary on rank 0, and add its numbers to metrics.jsonl if this call has trained. All ranks call it.

    Args:
        run (Trainer): what pretrain returned; a training that was interrupted gets no summary.
        corpus (Optional[TextCorpus]): what it was trained on; None: other data, of which no text can be written.
        with_sample (bool): let the model continue a line: of Python for its own sources, else the first held-out one.
        sample_tokens (int): length of that continuation.
    """
    if run.train_state.iteration < run.training_iters:
        return
    sample, settings = None, run.all_config.dataset_config
    has_trained = run.steps_done > 0
    if with_sample and has_trained and corpus is not None and _can_write(run):
        prompt, what = PROMPT, "a line of Python"
        if settings.data_path or settings.train_data_path:
            prompt, what = held_out_prompt(corpus), "the first held-out line" if len(corpus.valid_tokens) else "the first line"
        sample = write_sample(run, corpus, prompt, sample_tokens)
    if comm.get_rank() != 0:
        return
    folder = run.all_config.training_config.output_dir
    path = os.path.join(folder, METRICS_FILE)
    lines = read_metrics(path) if os.path.exists(path) else []
    numbers = summary(lines, corpus, run.all_config.model_config.vocab_size)
    if has_trained and run.all_config.training_config.eval_interval:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": run.train_state.iteration, **numbers}) + "\n")
    for line in text(numbers, run, folder):
        logger.info("%s", line)
    if sample is not None:
        logger.info("the model continues %s:\n%s", what, "\n".join(f"    | {line}" for line in sample.split("\n")))


def _can_write(run):
    return parallel_state.get_pipeline_model_parallel_world_size() == 1 or not _needs_whole_sequences(run)


def _needs_whole_sequences(run):
    """Whether the model that was trained cannot be fed token by token: it splits sequences, or its attention is a set band."""
    parallel = run.all_config.parallel_config
    has_band = has_explicit_band(run.all_config.model_config)
    return parallel.sequence_parallel or parallel.context_parallel_size > 1 or has_band


def summary(lines, corpus, vocab_size):
    """The numbers of the summary from the lines of a metrics.jsonl: dict[str, float]; what is unknown is left out."""
    losses = [line["loss"] for line in lines if isinstance(line.get("loss"), float)]
    held_out = [line["valid_loss"] for line in lines if isinstance(line.get("valid_loss"), float)]
    numbers = {"uniform_entropy": math.log(vocab_size)}
    if corpus is not None:
        numbers["unigram_entropy"] = corpus.unigram_entropy
    if losses:
        last = losses[-AVERAGED_STEPS:]
        numbers |= {"first_train_loss": losses[0], "last_train_loss": sum(last) / len(last), "averaged_steps": len(last)}
    if held_out:
        numbers["held_out_loss"] = held_out[-1]
    if held_out and corpus is not None:
        numbers["held_out_below_unigram"] = corpus.unigram_entropy - held_out[-1]
    return numbers


def text(numbers, run, folder):
    """The lines of the summary."""
    lines = []
    if "first_train_loss" in numbers:
        lines.append(
            f"training loss {numbers['first_train_loss']:.3f} -> {numbers['last_train_loss']:.3f} nats per token, "
            f"the latter {_over(numbers['averaged_steps'])} (a uniform guess over the vocabulary costs "
            f"{numbers['uniform_entropy']:.3f})"
        )
    if "held_out_below_unigram" in numbers:
        below = numbers["held_out_below_unigram"]
        side = "below" if below >= 0 else "above"
        lines.append(
            f"held-out loss {numbers['held_out_loss']:.3f}, unigram entropy of the corpus "
            f"{numbers['unigram_entropy']:.3f}: {abs(below):.3f} nats per token {side} it"
        )
    elif "held_out_loss" in numbers:
        lines.append(f"held-out loss {numbers['held_out_loss']:.3f} nats per token")
    lines.append(
        f"results in {os.path.abspath(folder)}: checkpoint iter_{run.train_state.iteration:07d}, {METRICS_FILE}, "
        f"{LOSS_CURVE_FILE}"
    )
    return lines


def _over(lines):
    return f"over the last {lines} lines" if lines > 1 else "of the only line"


def held_out_prompt(corpus):
    """The first tokens of the held-out text (of the training text if there is none), at most a line of it, as text."""
    tokens = corpus.valid_tokens if len(corpus.valid_tokens) else corpus.train_tokens
    ids = [int(token) for token in tokens[:PROMPT_TOKENS]]
    while corpus.end_of_document in ids:
        ids = ids[: ids.index(corpus.end_of_document)]
    text = corpus.tokenizer.detokenize(ids)
    return text.lstrip("\n").partition("\n")[0] or text


def write_sample(run, corpus, prompt, count):
    """Let the model continue `prompt` by up to `count` tokens (str); all ranks compute the same."""
    tokenizer, length = corpus.tokenizer, run.all_config.model_config.seq_length
    ids = tokenizer.tokenize(prompt, add_special_tokens=False) or [corpus.end_of_document]
    ids = ids[-max(1, length - count) :]
    settings = {"temperature": TEMPERATURE, "top_k": TOP_K, "seed": 0}
    params = SamplingParams(max_new_tokens=min(count, length - len(ids)), **settings)
    [answer] = Engine(_runner_of(run, corpus.vocab_size), tokenizer, [corpus.end_of_document]).generate([ids], params)
    return prompt + answer.text


def _runner_of(run, vocab_size):
    """Runner of the model that was trained, with its weights as they are."""
    length = run.all_config.model_config.seq_length
    if _needs_whole_sequences(run):
        return _WholeSequences(run.model[0], vocab_size, length)
    return ModelRunner(run.model, describe_model(run.all_config), vocab_size, length, slots=1)


class _WholeSequences:
    """Runner without a cache: sequences are filled up to their full length, which causal attention hides."""

    def __init__(self, model, vocab_size, max_sequence_length):
        self.vocab_size, self.max_sequence_length, self.slots = vocab_size, max_sequence_length, 1
        self._model, self._ids = model, []
        model.set_train(False)

    def forward(self, feeds):
        """See ModelRunner; there is one slot."""
        [feed] = feeds
        self._ids = [*self._ids[: feed.start], *feed.ids]
        return [self._next_logits() if feed.wants == "last" else None]

    def _next_logits(self):
        tokens = np.zeros((1, self.max_sequence_length), np.int32)
        tokens[0, : len(self._ids)] = self._ids
        positions = np.arange(self.max_sequence_length, dtype=np.int32)[None]
        with autograd.no_grad():
            logits = self._model(tokens=Tensor(tokens), position_ids=Tensor(positions), attention_mask=None, loss_mask=None)
            logits = gather_from_tensor_model_parallel_region(logits)
        return whole_along(logits.float().asnumpy())[0, len(self._ids) - 1, : self.vocab_size]
