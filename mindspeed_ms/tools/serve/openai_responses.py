"""Bodies of OpenAI's answers, whole and streamed, made from the engine's events."""

import time
import uuid
from dataclasses import dataclass, field

from mindspeed_ms.inference.detokenize import REPLACEMENT


def token_text(detokenize, token, is_first=False):
    """Text (str) of one token (int) inside of a text, where decoders keep the space that they drop at its beginning.

    Args:
        detokenize (Callable): ids -> text.
        token (int): the token.
        is_first (bool): it begins the text.
    """
    alone = detokenize([token])
    twice = "" if is_first else detokenize([token, token])
    return twice[len(alone) :] if twice.startswith(alone) else alone


@dataclass
class Answer:
    """An answer as it grows.

    Attributes:
        index (int): number of the choice.
        prompt (tuple[int, ...]): ids before it.
        offset (int): characters of the tokens that a stream has told so far.
    """

    index: int
    prompt: tuple
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_logprobs: tuple | None = None
    logprobs: list = field(default_factory=list)
    token_ids: list = field(default_factory=list)
    offset: int = 0

    def take(self, event):
        """Add what an event tells."""
        self.text += event.text
        self.token_ids.extend(event.token_ids)
        self.finish_reason = event.finish_reason
        self.prompt_tokens, self.completion_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.logprobs.extend(event.logprobs)


def usage_of(answers):
    """Usage (dict) of the answers to a request: tokens of each prompt count once."""
    prompts = {id(answer.prompt): answer.prompt_tokens for answer in answers}
    prompt_tokens, completion_tokens = sum(prompts.values()), sum(answer.completion_tokens for answer in answers)
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


class Completions:
    """Answers of `/v1/completions`.

    Args:
        model (str): name of the model.
        tokenizer (Optional[Tokenizer]): for the texts of single tokens.
        echo (bool): the prompt comes before the answer.
        with_logprobs (bool): give log-probabilities.
    """

    object_name, stream_object_name, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, model, tokenizer, echo=False, with_logprobs=False):
        self.model, self.tokenizer, self.echo, self.with_logprobs = model, tokenizer, echo, with_logprobs
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, answers):
        """Body of the answer to a request that is not streamed."""
        choices = [self.choice(answer) for answer in answers]
        return {**self.head, "object": self.object_name, "choices": choices, "usage": usage_of(answers)}

    def chunk(self, choices, usage=None, wants_usage=False):
        """One body of a stream; with `stream_options.include_usage` each has a usage, null but in the last."""
        body = {**self.head, "object": self.stream_object_name, "choices": choices}
        return {**body, "usage": usage} if wants_usage else body

    def choice(self, answer):
        """One choice of a whole answer."""
        logprobs = self._logprobs(answer.prompt if self.echo else (), answer.prompt_logprobs, answer.logprobs)
        text = self._shown(answer.prompt) + answer.text if self.echo else answer.text
        return {"index": answer.index, "text": text, "logprobs": logprobs, "finish_reason": answer.finish_reason}

    def first(self, answer):
        """Choices that open the stream of an answer, before its first token."""
        return []

    def delta(self, answer, event, is_first):
        """One choice of a stream for an event."""
        echo = self.echo and is_first
        logprobs = self._logprobs(answer.prompt if echo else (), event.prompt_logprobs, event.logprobs, answer.offset)
        if logprobs and logprobs["tokens"]:
            answer.offset = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        text = self._shown(answer.prompt) + event.text if echo else event.text
        return {"index": answer.index, "text": text, "logprobs": logprobs, "finish_reason": event.finish_reason}

    def _shown(self, ids):
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return self.tokenizer.detokenize([number for number in ids if number < self.tokenizer.vocab_size])  # no padding rows

    def _logprobs(self, prompt, of_prompt, of_answer, offset=0):
        """OpenAI's legacy form: lists that run along the tokens."""
        if not self.with_logprobs:
            return None
        known = [None, *(of_prompt or ())] if prompt else []
        tokens = [*prompt, *(score.token_id for score in of_answer)]
        texts = [self._token_text(token, bool(prompt) and not place) for place, token in enumerate(tokens)]
        tops = [None] * len(prompt) + [self._by_text(score.top) for score in of_answer]
        offsets = [offset]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        values = [*known, *(score.logprob for score in of_answer)]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets[:-1]}

    def _token_text(self, token, is_first=False):
        return token_text(self._shown, token, is_first)

    def _by_text(self, top):
        """Log-probabilities by text; of tokens that look the same, such as parts of characters, the likeliest counts."""
        found = {}
        for token, value in top:
            found.setdefault(self._token_text(token), value)
        return found


class ChatCompletions(Completions):
    """Answers of `/v1/chat/completions`."""

    object_name, stream_object_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, answer):
        """See Completions."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        logprobs = self._content_logprobs(answer.logprobs)
        return {"index": answer.index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason}

    def first(self, answer):
        """See Completions: the role of the speaker."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [{"index": answer.index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def delta(self, answer, event, is_first):
        """See Completions."""
        delta = {"content": event.text} if event.text or event.finish_reason is None else {}
        logprobs = self._content_logprobs(event.logprobs)
        return {"index": answer.index, "delta": delta, "logprobs": logprobs, "finish_reason": event.finish_reason}

    def _content_logprobs(self, scores):
        if not self.with_logprobs:
            return None
        content = [
            {**self._token(score.token_id, score.logprob), "top_logprobs": [self._token(*one) for one in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id, logprob):
        text = self._token_text(token_id)
        known = None if REPLACEMENT in text else list(text.encode())  # a part of a character is not these bytes
        return {"token": text, "logprob": logprob, "bytes": known}
