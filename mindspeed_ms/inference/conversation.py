"""Conversation: history of a chat, rendered to the prompt of the next answer; the oldest turns go when the context is full."""

from dataclasses import dataclass

from mindspeed_ms.core.datasets.tokenizer.chat_template import JinjaTemplate
from mindspeed_ms.inference.sampling import RequestError


def jinja_prompt(tokenizer, enable_thinking=None, hint=""):
    """Function `messages (list[dict]) -> ids (list[int])`: the prompt of the next answer by the tokenizer's chat template.

    `hint` ends the error about a tokenizer without a template: what to do.

    Raises:
        TemplateError: the tokenizer has none, or a damaged one; from the function: it refuses the messages.
    """
    template = JinjaTemplate(tokenizer, enable_thinking, f"a conversation needs a chat template, but {{place}}{hint}.")

    def prompt(messages):
        text = template.render(messages, add_generation_prompt=True)
        return tokenizer.tokenize(text, add_special_tokens=False)

    return prompt


@dataclass(frozen=True)
class Question:
    """A prompt: its token ids (tuple[int, ...]), and how many of the oldest turns do not fit any more (int)."""

    ids: tuple[int, ...]
    dropped: int


class Conversation:
    """Messages of a chat. A turn is a question and its answer.

    Args:
        prompt (Callable): messages -> ids, such as `jinja_prompt` gives.
        context (int): tokens that prompt and answer may have together.
        reserved (int): tokens that are kept free for an answer.
        system (Optional[str]): system message, which stays.
        history_turns (Optional[int]): earlier turns that are kept at most; None: as many as fit.

    Attributes:
        messages (list[dict]): roles and contents, without the system message.
    """

    def __init__(self, prompt, context, reserved=1, system=None, history_turns=None):
        self._prompt, self._room, self._history_turns = prompt, context - reserved, history_turns
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages = []

    def ask(self, text):
        """Add a question (str). Turns that do not fit any more are dropped for good.

        Returns:
            Question

        Raises:
            RequestError: the question is too long even without history; it is withdrawn, the history stays.
            TemplateError: the template refuses the conversation; likewise.
        """
        messages, dropped = [*self.messages, {"role": "user", "content": text}], 0
        if self._history_turns is not None:
            messages = messages[-2 * self._history_turns - 1 :]
        ids = self._prompt(self._system + messages)
        while len(ids) > self._room and len(messages) > 1:
            messages, dropped = messages[2:], dropped + 1
            ids = self._prompt(self._system + messages)
        if len(ids) > self._room:
            raise RequestError(
                "prompt", f"has {len(ids)} tokens with the template, but {self._room} fit beside an answer: shorten it."
            )
        self.messages = messages
        return Question(tuple(ids), dropped)

    def answer(self, text):
        """Add the answer (str) to the last question; an empty one withdraws the question."""
        if text.strip():
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def clear(self):
        """Forget everything but the system message."""
        self.messages = []
