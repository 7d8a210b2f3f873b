"""Streaming detokenisation: text of tokens as they come, whole characters only, cut in front of stop texts."""

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no UTF-8; it is never shown."""

_LONGEST_UNFINISHED = 32
"""Tokens without a whole character after which what they have is given up."""


class TextStream:
    """Text of an answer, token by token. The parts joined are the text of all tokens, without special tokens.

    A decoder needs the tokens before: it drops a space in front of the first. So each new part is what the text of the tokens
    of the part before grows by, as in transformers' and vLLM's streaming; they are whole characters.

    Args:
        tokenizer (Tokenizer): see there.
        prompt (sequence[int]): tokens before the answer.
    """

    def __init__(self, tokenizer, prompt=()):
        self._tokenizer, self._special = tokenizer, tokenizer.special_ids
        size = tokenizer.vocab_size
        self._ids = [number for number in prompt if number not in self._special and number < size]
        self._shown = self._text(self._ids)
        self._new = 0  # tokens that have shown nothing yet

    def add(self, token):
        """New text (str) that a token (int) completes; often "" for the parts of a character."""
        if token in self._special or token >= self._tokenizer.vocab_size:  # the model's vocabulary may be padded
            return ""
        self._ids.append(token)
        self._new += 1
        text = self._text(self._ids)
        if text.endswith(REPLACEMENT) and self._new < _LONGEST_UNFINISHED:
            return ""
        return self._show(text)

    def finish(self):
        """The rest (str): whole characters among the tokens that have shown nothing yet."""
        return self._show(self._text(self._ids)) if self._new else ""

    def _show(self, text):
        part = text[len(_common_start(text, self._shown)) :]
        self._ids = self._ids[-self._new :]
        self._shown, self._new = self._text(self._ids), 0
        return part.replace(REPLACEMENT, "")

    def _text(self, ids):
        return self._tokenizer.detokenize(ids)


def _common_start(text, shown):
    """The part of `shown`, whose end may be an unfinished character, that `text` begins with."""
    if text.startswith(shown):
        return shown
    whole = shown.rstrip(REPLACEMENT)
    while not text.startswith(whole):
        whole = whole[:-1]
    return whole


class StopText:
    """Looks for stop texts in a text that comes in parts, and holds back what may be the beginning of one.

    Args:
        stops (sequence[str]): stop texts.

    Attributes:
        matched (Optional[str]): the stop text that was found: the first that is complete, the longest of these.
    """

    def __init__(self, stops):
        self._stops, self._held, self.matched = sorted(stops, key=len, reverse=True), "", None

    def add(self, part):
        """Text (str) that may be shown after `part`: all of it in front of a stop text, or of what may become one."""
        text = self._held + part
        found = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, self.matched = min(found, key=lambda entry: entry[0])
            self._held = ""
            return text[: end - len(self.matched)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self):
        """The text held back (str), which is no stop text after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text, stop):
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
