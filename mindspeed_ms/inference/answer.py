"""Answer: state of one answer while it is generated: its tokens, its text, what ends it."""

import numpy as np

from mindspeed_ms.inference.detokenize import StopText, TextStream
from mindspeed_ms.inference.requests import LENGTH, STOP, Event, TokenScore, Usage
from mindspeed_ms.inference.sampling import log_softmax, next_token


class Answer:
    """One answer to a request.

    Args:
        request_id (int), sample (int): which one it is.
        request (Request): prompt and parameters, with a seed.
        tokenizer (Optional[Tokenizer]): for its text.
        eos_ids (frozenset[int]): the model's end tokens.
        max_sequence_length (int): context.

    Attributes:
        tokens (list[int]): the answer so far.
        fed (int): tokens of prompt and answer that are in the cache.
        limit (int): largest number of tokens.
        prompt_logprobs (Optional[tuple[float, ...]]): to be told with the first event.
    """

    def __init__(self, request_id, sample, request, tokenizer, eos_ids, max_sequence_length):
        self.request, self.sample, self.prompt, self.params = request_id, sample, request.prompt, request.params
        self.tokens, self.fed, self.prompt_logprobs = [], 0, None
        room = max_sequence_length - len(self.prompt)
        self.limit = room if self.params.max_new_tokens is None else self.params.max_new_tokens
        self._ends = {number: number for number in (*(() if self.params.ignore_eos else eos_ids), *self.params.stop_token_ids)}
        self._text = None if tokenizer is None else TextStream(tokenizer, self.prompt)
        stops = self.params.stop
        if tokenizer is not None:  # a special token has no text in which it could be found
            single = {text: tokenizer.token_to_id(text) for text in stops}
            self._ends |= {number: text for text, number in single.items() if number in tokenizer.special_ids}
        self._stop = StopText(stops)

    @property
    def is_prompt(self):
        """Whether tokens of the prompt are still to be fed (bool)."""
        return self.fed < len(self.prompt)

    def next_ids(self, longest):
        """(position, ids, whether the next token follows them) of what is to be fed now, at most `longest` tokens."""
        if not self.is_prompt:
            return self.fed, (self.tokens[-1],), True
        ids = self.prompt[self.fed : self.fed + longest]
        return self.fed, ids, self.fed + len(ids) == len(self.prompt)

    def take(self, logits):
        """Choose the next token from logits (float32 [v]); returns the Event."""
        token = next_token(logits, self.params, self.prompt, self.tokens, self.sample)
        self.tokens.append(token)
        scores = () if self.params.logprobs is None else (_score(logits, token, self.params.logprobs),)
        if token in self._ends:
            return self._event((token,), self._rest(), STOP, self._ends[token], scores)
        text = "" if self._text is None else self._stop.add(self._text.add(token))
        if self._stop.matched is None and len(self.tokens) >= self.limit:
            text += self._rest()
            if self._stop.matched is None:
                return self._event((token,), text, LENGTH, None, scores)
        reason = None if self._stop.matched is None else STOP
        return self._event((token,), text, reason, self._stop.matched, scores)

    def end(self, reason):
        """The last Event (Event) of an answer that ends without a further token."""
        return self._event((), self._rest(), reason, None, ())

    def _rest(self):
        """Text that was held back."""
        if self._text is None:
            return ""
        text = self._stop.add(self._text.finish())
        return text if self._stop.matched is not None else text + self._stop.finish()

    def _event(self, tokens, text, reason, matched, scores):
        usage = Usage(len(self.prompt), len(self.tokens))
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return Event(self.request, self.sample, tokens, text, reason, matched, scores, prompt_logprobs, usage)


def _score(logits, token, alternatives):
    """TokenScore of a token, with this many likeliest ones."""
    values = log_softmax(logits)
    count = min(alternatives, len(values))
    best = np.argpartition(-values, count - 1)[:count] if count else []
    top = sorted(((int(number), float(values[number])) for number in best), key=lambda entry: (-entry[1], entry[0]))
    return TokenScore(token, float(values[token]), tuple(top))
