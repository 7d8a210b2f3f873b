"""SamplingParams (temperature, top-k, top-p, min-p, penalties, seed, stop words) and the choice of the next token from logits."""

from dataclasses import dataclass, fields

import numpy as np


class RequestError(ValueError):
    """Error: a request that cannot be served. A front end may put its own name of the parameter into the message.

    Args:
        parameter (str): name of the wrong parameter: a field of SamplingParams, or "prompt".
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
