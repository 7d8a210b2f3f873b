"""SamplingParams (temperature, top-k, top-p, min-p, penalties, seed, stop words) and the choice of the next token."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from mindspeed_ms.core.datasets.tokenizer.interface import TokenizerError, check_characters


class RequestError(ValueError):
    """Error: a request that cannot be served. A front end may put its own name of the parameter into the message.

    Args:
        parameter (str): name of the wrong parameter: a field of SamplingParams, "prompt" or "num_beams".
        rest (str): what follows the name in the message: value, what is expected, what to do.
    """

    def __init__(self, parameter, rest):
        super().__init__(f"{parameter} {rest}")
        self.parameter, self.rest = parameter, rest


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of an answer are chosen, and when it ends.

    Logits are changed in this order: repetition, presence and frequency penalty, temperature, top-k, top-p (of what top-k
    left), min-p (of the likeliest token's probability).

    Args:
        max_new_tokens (Optional[int]): longest answer; None: what fits into the context; 0: none (only scores of the prompt).
        temperature (float): divides the logits; 0: the likeliest token (greedy).
        top_k (int): only the k likeliest tokens; 0: all.
        top_p (float): only the likeliest tokens whose probabilities reach p together; 1: all.
        min_p (float): only tokens at least this many times as likely as the likeliest; 0: all.
        repetition_penalty (float): divides positive and multiplies negative logits of all tokens so far, prompt included.
        presence_penalty (float): subtracted from the logit of each token that is in the answer.
        frequency_penalty (float): subtracted from the logit of a token, times its count in the answer.
        seed (Optional[int]): same seed, same answer, whatever else is in the batch; None: another one each time.
        n (int): answers for the prompt.
        stop (tuple[str, ...]): texts that end the answer; they are not part of its text.
        stop_token_ids (tuple[int, ...]): tokens that end the answer, beside the model's end tokens.
        ignore_eos (bool): the model's end tokens do not end the answer.
        logprobs (Optional[int]): give the log-probability of each token, and of this many likeliest ones beside it.
        prompt_logprobs (bool): give the log-probability of each token of the prompt but the first.

    Raises:
        RequestError: a value out of its range.
    """

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self):
        for name, (lowest, highest, words) in _NUMBERS.items():
            value = getattr(self, name)
            _expect(_is_number(value) and lowest <= value <= highest, name, value, words)
        for name in ("top_p", "repetition_penalty"):
            _expect(getattr(self, name) > 0, name, getattr(self, name), _NUMBERS[name][2])
        for name, (lowest, words) in _INTEGERS.items():
            value = getattr(self, name)
            _expect(_is_integer(value) and value >= lowest, name, value, words)
        for name, words in _OPTIONAL_INTEGERS.items():
            value = getattr(self, name)
            _expect(value is None or (_is_integer(value) and value >= 0), name, value, words)
        _expect(self.seed is None or self.seed < 2**64, "seed", self.seed, "an integer from 0 to 2**64 - 1, or None")
        words = "texts, none of them empty"
        _expect(not isinstance(self.stop, str), "stop", self.stop, f"a tuple of {words}")
        _expect(all(isinstance(text, str) and text for text in self.stop), "stop", self.stop, words)
        try:
            check_characters(self.stop)
        except TokenizerError as error:
            raise RequestError("stop", f"cannot be found in a text: {error}") from None
        numbers = self.stop_token_ids
        _expect(all(_is_integer(number) and number >= 0 for number in numbers), "stop_token_ids", numbers, "token ids >= 0")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(number) for number in numbers))

    @property
    def is_greedy(self):
        """Whether the likeliest token is taken (bool)."""
        return self.temperature == 0


_NUMBERS = {
    "temperature": (0, math.inf, "a number >= 0 (0: greedy)"),
    "top_p": (0, 1, "a number > 0 and <= 1 (1: all tokens)"),
    "min_p": (0, 1, "a number >= 0 and <= 1 (0: all tokens)"),
    "repetition_penalty": (0, math.inf, "a number > 0 (1: no penalty)"),
    "presence_penalty": (-math.inf, math.inf, "a number (0: no penalty)"),
    "frequency_penalty": (-math.inf, math.inf, "a number (0: no penalty)"),
}
_FEW = 512
_INTEGERS = {"top_k": (0, "an integer >= 0 (0: all tokens)"), "n": (1, "an integer >= 1")}
_OPTIONAL_INTEGERS = {
    "max_new_tokens": "an integer >= 0, or None for what fits into the context",
    "seed": "an integer >= 0, or None",
    "logprobs": "an integer >= 0 (alternatives beside the token's own), or None",
}


def _is_number(value):
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value):
    return isinstance(value, Integral) and not isinstance(value, bool)


def _expect(holds, name, value, words):
    if not holds:
        raise RequestError(name, f"is {value!r}: expected {words}.")


def penalized(logits, params, prompt, answer):
    """Logits after the penalties.

    Args:
        logits (ndarray): float64 [v]; it is changed.
        params (SamplingParams): the penalties.
        prompt, answer (sequence[int]): tokens so far.
    """
    if params.repetition_penalty != 1:
        seen = np.unique(np.array([*prompt, *answer], np.int64))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and len(answer):
        seen, counts = np.unique(np.array(answer, np.int64), return_counts=True)
        logits[seen] -= params.presence_penalty + params.frequency_penalty * counts
    return logits


def probabilities(logits, params):
    """Probabilities of the tokens that temperature, top-k, top-p and min-p leave.

    Of equally likely tokens those with lower ids come first, so that exactly `top_k` are left.

    Args:
        logits (ndarray): float64 [v], after the penalties.
        params (SamplingParams): with a temperature > 0.

    Returns:
        (ndarray, ndarray): ids int64 [k], ascending, and their probabilities float64 [k], whose sum is 1
    """
    ids = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        ids = _likeliest(logits, params.top_k)
    weights = _softmax(logits[ids], params.temperature)
    if params.top_p < 1:
        keep = _nucleus(weights, params.top_p)
        ids, weights = ids[keep], weights[keep]
    if params.min_p > 0:
        keep = weights >= params.min_p * weights.max()
        ids, weights = ids[keep], weights[keep]
    return ids, weights / weights.sum()


def _softmax(logits, temperature):
    with np.errstate(over="ignore"):  # a tiny temperature: all but the likeliest become 0
        weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


def _nucleus(weights, mass):
    """Indices, ascending, of the likeliest tokens that reach a probability together."""
    for count in (_FEW, len(weights)):  # sorting all of a large vocabulary takes as long as a small model's step
        likely = _likeliest(weights, min(count, len(weights)))
        order = likely[np.argsort(-weights[likely], kind="stable")]
        before = np.cumsum(weights[order]) - weights[order]  # of the tokens in front of each
        if before[-1] >= mass:
            break
    return np.sort(order[before < mass])


def _likeliest(logits, count):
    """Ids, ascending, of the `count` likeliest tokens."""
    smallest = np.partition(logits, -count)[-count]
    above, equal = np.flatnonzero(logits > smallest), np.flatnonzero(logits == smallest)
    return np.sort(np.concatenate((above, equal[: count - len(above)])))


def draw(seed, sample, position):
    """A random number in [0, 1) (float) that depends on nothing but the seed, the answer's number and the token's position."""
    return float(np.random.Generator(np.random.Philox(key=[seed, sample], counter=position)).random())


def next_token(logits, params, prompt, answer, sample=0):
    """The next token (int) of an answer.

    Args:
        logits (ndarray): float32 [v] of the model; not changed.
        params (SamplingParams): with a seed, unless it is greedy.
        prompt, answer (sequence[int]): tokens so far.
        sample (int): number of the answer among those of one prompt.

    Raises:
        ValueError: the logits are no numbers.
    """
    logits = penalized(logits.astype(np.float64), params, prompt, answer)
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        raise ValueError(
            f"the logits of token {len(prompt) + len(answer)} are not finite: the weights are damaged, or too large for the "
            "compute dtype; try float32."
        )
    if params.is_greedy:
        return int(logits.argmax())
    ids, weights = probabilities(logits, params)
    cumulated = np.cumsum(weights)
    number = draw(params.seed, sample, len(prompt) + len(answer)) * cumulated[-1]
    return int(ids[np.searchsorted(cumulated, number, side="right")])


def log_softmax(logits):
    """Log-probabilities float64 [v] of logits [v]."""
    logits = logits.astype(np.float64)
    logits -= logits.max()
    return logits - np.log(np.exp(logits).sum())
