"""Log-likelihoods of continuations, in batches: tokens of contexts and continuations, cuts to the context, order."""

from dataclasses import dataclass

import numpy as np

from mindspeed_ms.tasks.evaluation.errors import EvaluationError


@dataclass(frozen=True)
class Likelihood:
    """Log-likelihood of a continuation.

    Attributes:
        total (float): sum of the log-probabilities of its tokens.
        is_greedy (bool): each token is the most probable one.
        tokens (int): how many.
        is_cut (bool): the beginning of the context did not fit.
    """

    total: float
    is_greedy: bool
    tokens: int
    is_cut: bool


def encode_pair(tokenizer, context, continuation):
    """Ids of a context and of its continuation, cut out of the tokens of the joined text as lm-evaluation-harness does.

    Spaces at the end of the context belong to the continuation. An empty context is the tokenizer's begin or end token.

    Raises:
        EvaluationError: a continuation without tokens, an empty context and no such token.
    """
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    if context:
        before = _without_end(tokenizer, tokenizer.tokenize(context))
        whole = _without_end(tokenizer, tokenizer.tokenize(context + continuation))
        after = whole[len(before) :]
        before = whole[: len(before)]
    else:
        before, after = prefix_of(tokenizer), tokenizer.tokenize(continuation, add_special_tokens=False)
    if not after:
        raise EvaluationError(f"the continuation {continuation!r} adds no token to its context.")
    return list(before), list(after)


def prefix_of(tokenizer):
    """Ids (list[int]) that stand before a text without context: the begin token, else the end token."""
    for token in (tokenizer.bos, tokenizer.eos):
        if token is not None:
            return [token]
    raise EvaluationError(f"{tokenizer.name} has no begin and no end token, and the context is empty: give some context.")


def _without_end(tokenizer, ids):
    return ids[:-1] if tokenizer.adds_eos and ids[-1:] == [tokenizer.eos] else ids


def check_pair(pair, limits):
    """Check ids of context and continuation against `max_sequence_length` and `vocab_size` of a model.

    Raises:
        EvaluationError: a continuation longer than the context of the model, an id out of its vocabulary.
    """
    context, continuation = pair
    longest, largest = limits.max_sequence_length, max((*context, *continuation), default=0)
    if len(continuation) >= longest:
        raise EvaluationError(f"a continuation has {len(continuation)} tokens: the model's context is {longest}.")
    if largest >= limits.vocab_size:
        raise EvaluationError(
            f"a text has the token id {largest}: the model's vocabulary has {limits.vocab_size} ids. It has another tokenizer."
        )


def likelihoods(runner, pairs, batch_size, progress=None):
    """Log-likelihoods of continuations.

    Args:
        runner (ModelRunner): the model.
        pairs (sequence[tuple[list[int], list[int]]]): ids of context and continuation.
        batch_size (int): sequences at a time; longest first.
        progress (Optional[Callable]): called with the number of pairs that are done.

    Returns:
        list[Likelihood] in the order of `pairs`

    Raises:
        EvaluationError: a continuation longer than the context of the model.
    """
    longest = runner.max_sequence_length
    sequences, starts, cuts = [], [], []
    for context, continuation in pairs:
        check_pair((context, continuation), runner)
        kept = context[-(longest - len(continuation)) :]
        sequences.append([*kept, *continuation])
        starts.append(len(kept))
        cuts.append(len(kept) < len(context))
    order = sorted(range(len(pairs)), key=lambda index: -len(sequences[index]))
    results = [None] * len(pairs)
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        scored = runner.score([sequences[index] for index in chosen], [starts[index] for index in chosen])
        for index, one in zip(chosen, scored):
            values = one.log_probabilities
            results[index] = Likelihood(float(np.sum(values)), bool(np.all(one.is_greedy)), len(values), cuts[index])
        if progress:
            progress(len(chosen))
    return results
