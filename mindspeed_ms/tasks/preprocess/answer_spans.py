"""Positions of the answers in the text that a chat template renders for a whole conversation."""

from mindspeed_ms.core.datasets.tokenizer.chat_template import TemplateError

_MARK = "\ue000"  # for private use: no text has it


def answer_pieces(render, before, messages, tools):
    """Split the rendered text of a conversation into pieces: the text before each answer, and the answer.

    Most templates write a beginning of the conversation as they write it in the whole one. Others (thoughts of earlier answers
    left out, tools before the last question, ...) do not; there an answer is found by rendering the conversation with a mark in
    it, and its header is looked for in front.

    Args:
        render (Callable): ChatTemplate.render.
        before (list[dict]): system message, if any.
        messages, tools (list[dict]): as Hugging Face has them; questions and answers in turn, an answer last.

    Returns:
        list[tuple[str, str]]: text before each answer, and the answer with its end token.

    Raises:
        TemplateError: the template refuses the conversation, or an answer or a call is not found.
    """
    conversation = _Conversation(render, [*before, *messages], tools)
    pieces, done = [], 0
    for number, message in enumerate(messages, 1):
        if message["role"] != "assistant":
            continue
        begin, end = conversation.span(number - 1 + len(before), done, number)
        text = _without_line_end(conversation.text[begin:end], message)
        _check_calls(text, message, number)
        pieces.append((conversation.text[done:begin], text))
        done = begin + len(text)
    return pieces


class _Conversation:
    """Conversation with its rendered text."""

    def __init__(self, render, messages, tools):
        self._render, self.messages, self._tools = render, messages, tools
        self.text = render(messages, tools)

    def span(self, index, done, number):
        """Bounds (begin, end), behind `done` in the text, of the answer messages[index]; `number` is its name for the user."""
        prompt = self._render(self.messages[:index], self._tools, add_generation_prompt=True)
        is_last = index + 1 == len(self.messages)
        whole = self.text if is_last else self._render(self.messages[: index + 1], self._tools)
        begins, ends = (self.text.startswith(part) for part in (prompt, whole))
        if begins and ends and done <= len(prompt) <= len(whole):
            return len(prompt), len(whole)
        marked = [*self.messages[:index], _marked(self.messages[index]), *self.messages[index + 1 :]]
        other, alone = self._render(marked, self._tools), self._render(marked[: index + 1], self._tools)
        behind, ending = (_common(left[::-1], right[::-1]) for left, right in ((self.text, other), (whole, alone)))
        end = len(self.text) - behind + ending
        last = _common(self.text, other)
        begin = len(prompt) if begins else self._behind_header(index, done, last, prompt, is_last)
        found = _MARK in other and _MARK in alone and self.text[end - ending : end] == whole[len(whole) - ending :]
        if not found or begin is None or not done <= begin < end:
            raise TemplateError(
                f"the tokenizer's chat template changes what stands before message {number} once it is "
                "there, so no part can be learnt by itself: use single-turn data, or a template of "
                "templates.json."
            )
        self._check_system()
        return begin, end

    def _behind_header(self, index, first, last, prompt, is_last):
        """End of an answer's header between two places of the text; None if there is no header.

        The last answer follows the whole header, as when a model is asked; an earlier one may lack the thought that
        `enable_thinking` puts there.
        """
        headers = [self._header(index, prompt)]
        if not is_last:
            for value in (True, False):
                other = self._render(self.messages[:index], self._tools, add_generation_prompt=True, enable_thinking=value)
                headers.append(headers[-1][: _common(headers[-1], self._header(index, other))])
        for header in headers:
            place = self.text.rfind(header, first, last) if header else -1
            if place >= 0:
                return place + len(header)
        return None

    def _header(self, index, prompt):
        """Text of a prompt behind its last question: the generation prompt, or else the text behind the question's."""
        question = self._render(self.messages[:index], self._tools)
        if prompt.startswith(question) and prompt != question:
            return prompt[len(question) :]
        content = self.messages[index - 1]["content"].strip()
        return prompt.rpartition(content)[2] if content else ""

    def _check_system(self):
        """Refuse templates that write the system message only where a question is last."""
        first = self.messages[0]
        if first["role"] == "system" and first["content"].strip() not in self.text:
            raise TemplateError(
                "the tokenizer's chat template leaves the system message out of a conversation that ends with an answer: put "
                "it into the first question, or use a template of templates.json."
            )


def _marked(answer):
    """Copy of the answer with a mark: in the name of its first call, or in place of its text."""
    if not answer.get("tool_calls"):
        return {"role": "assistant", "content": _MARK}
    first, *others = answer["tool_calls"]
    function = first["function"] | {"name": _MARK + first["function"]["name"]}
    return answer | {"tool_calls": [first | {"function": function}, *others]}


def _common(left, right):
    """Length of the common beginning of two texts."""
    shorter = min(len(left), len(right))
    return next((place for place in range(shorter) if left[place] != right[place]), shorter)


def _without_line_end(text, answer):
    """Text of an answer without blanks behind its end token; unchanged if the template writes no end token."""
    stripped, content = text.rstrip(), (answer["content"] or "").strip()
    if content and not answer.get("tool_calls") and stripped.endswith(content):
        return text
    return stripped or text


def _check_calls(text, answer, number):
    written = text.replace(answer["content"] or "", "")
    for call in answer.get("tool_calls", ()):
        if call["function"]["name"] not in written:
            raise TemplateError(
                f"the tokenizer's chat template does not write that message {number} calls {call['function']['name']!r}, so "
                "the call would not be learnt: use the template of a model that calls tools, or one of templates.json."
            )
