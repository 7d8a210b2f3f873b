"""Request, Event, Completion: what the generation engine takes and returns (tokens, text, log-probabilities, finish reason)."""

from dataclasses import dataclass, field

from mindspeed_ms.inference.sampling import SamplingParams

STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"  # finish reasons


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Args:
        prompt (tuple[int, ...]): token ids, at least one.
        params (SamplingParams): how to continue it.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class TokenScore:
    """Log-probability of a token under the model (before penalties and temperature), and of the likeliest ones in its place.

    Attributes:
        token_id (int), logprob (float): the token.
        top (tuple[tuple[int, float], ...]): (token id, log-probability) of the `logprobs` likeliest, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens of the prompt and of one answer (its end token included)."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Event:
    """What a step added to an answer.

    Attributes:
        request (int): id that `Engine.add` gave.
        sample (int): number of the answer, from 0 to params.n - 1.
        token_ids (tuple[int, ...]): new tokens; an end token is among them, though it has no text.
        text (str): new text that may be shown: whole characters, and nothing of a stop text.
        finish_reason (Optional[str]): "stop" (end token, stop text), "length" or "cancelled" in the last event of an answer.
        matched_stop (Optional[int | str]): the end token or stop text that ended it.
        logprobs (tuple[TokenScore, ...]): of `token_ids`, if params.logprobs asked for them.
        prompt_logprobs (Optional[tuple[float, ...]]): of prompt[1:], in the first event of each answer, if asked for.
        usage (Usage): tokens so far.
    """

    request: int
    sample: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    matched_stop: int | str | None
    logprobs: tuple[TokenScore, ...]
    prompt_logprobs: tuple[float, ...] | None
    usage: Usage


@dataclass(frozen=True)
class Completion:
    """A whole answer; its fields are those of its events, joined."""

    request: int
    sample: int
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    matched_stop: int | str | None
    logprobs: tuple[TokenScore, ...]
    prompt_logprobs: tuple[float, ...] | None
    usage: Usage

    @classmethod
    def of(cls, prompt, events):
        """Completion of the events (list[Event]) of one answer to `prompt`."""
        first, last = events[0], events[-1]
        return cls(
            first.request,
            first.sample,
            tuple(prompt),
            tuple(token for event in events for token in event.token_ids),
            "".join(event.text for event in events),
            last.finish_reason,
            last.matched_stop,
            tuple(score for event in events for score in event.logprobs),
            next((event.prompt_logprobs for event in events if event.prompt_logprobs is not None), None),
            last.usage,
        )
