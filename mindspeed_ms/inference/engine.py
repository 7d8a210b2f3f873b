"""Engine: generates for many requests at once (continuous batching over the slots of the key-value cache)."""

from dataclasses import dataclass, field

from mindspeed_ms.inference.sampling import RequestError, SamplingParams

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


class Engine:
    """Generates for many requests at once.

    Requests that find no free slot wait for one, first come first served. All ranks call the same methods in the same order
    (`inference.ranks` sees to it), and compute the same tokens.

    Args:
        runner (ModelRunner): the model, with `slots` slots of its cache.
        tokenizer (Optional[Tokenizer]): turns tokens into text; without one events have no text and prompts are ids.
        eos_ids (sequence[int]): tokens that end an answer.
    """

    def __init__(self, runner, tokenizer=None, eos_ids=()):
        raise NotImplementedError

    @property
    def has_work(self):
        """Whether a request waits or runs (bool): `step` has something to do."""
        raise NotImplementedError

    def check(self, request):
        """Raise RequestError if a request cannot be served: empty or too long prompt, id out of the vocabulary, ..."""
        raise NotImplementedError

    def add(self, request):
        """Add a request; returns its id (int). Ids count from 0.

        Raises:
            RequestError: see `check`.
        """
        raise NotImplementedError

    def cancel(self, request_id):
        """End a request; its answers get events with finish reason "cancelled" at the next step. An ended one is ignored."""
        raise NotImplementedError

    def step(self):
        """Run the model once, for prompts or for one token of each running answer; returns list[Event]."""
        raise NotImplementedError

    def generate(self, prompts, params):
        """Answers to several prompts.

        Args:
            prompts (list[str | sequence[int]]): texts or token ids.
            params (SamplingParams | list[SamplingParams]): for all, or one for each.

        Returns:
            list[Completion], params.n of them for each prompt, in the order of the prompts
        """
        raise NotImplementedError

    def stream(self, prompt, params):
        """Iterator over the events of one prompt (str or token ids); closing it cancels the request."""
        raise NotImplementedError
