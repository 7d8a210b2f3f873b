"""Chat in the terminal: questions from the standard input, answers word by word."""

import io
import sys

from mindspeed_ms.core.datasets.tokenizer.chat_template import TemplateError
from mindspeed_ms.core.datasets.tokenizer.interface import TokenizerError
from mindspeed_ms.inference.conversation import Conversation
from mindspeed_ms.inference.requests import Request
from mindspeed_ms.inference.sampling import RequestError

HELP = "Ctrl-C ends an answer, Ctrl-D or exit the chat; clear forgets what was said"
_ENDS, _CLEARS = ("exit", "quit", "q", "/exit", "/quit"), ("clear", "new", "/clear")  # MindSpeed-LLM's, and with a slash


def chat(engine, template, params, terminal, system=None, history_turns=None, read=None):
    """Hold a chat until its end is asked for.

    Args:
        engine (Engine): on rank 0.
        template (Callable): messages -> ids.
        params (SamplingParams): max_new_tokens None: what fits, a quarter of the context at least.
        terminal (Terminal): where answers are shown.
        system, history_turns: as of Conversation.
        read (Optional[Callable]): () -> a line; raises EOFError at the end. Default: the standard input.
    """
    context = engine.runner.max_sequence_length
    reserved = params.max_new_tokens or max(1, context // 4)
    conversation = Conversation(template, context, reserved, system, history_turns)
    if read is None:
        read = _read_line
        if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no UTF-8 spoil their question, not the chat
            sys.stdin.reconfigure(errors="surrogateescape")
    terminal.note(HELP)
    while True:
        try:
            text = read()
        except EOFError:
            terminal.write("\n")
            return
        except KeyboardInterrupt:
            terminal.write("\n")
            terminal.note(HELP)
            continue
        if text.strip() in _ENDS:
            return
        if text.strip() in _CLEARS:
            conversation.clear()
        elif text.strip():
            _answer(engine, conversation, params, terminal, text)


def _answer(engine, conversation, params, terminal, text):
    try:
        question = conversation.ask(text)
        request = Request(question.ids, params)
        engine.check(request)
    except (RequestError, TemplateError, TokenizerError) as error:
        terminal.note(f"the question is left out: {error}")
        return
    if question.dropped:
        turns = "turn is" if question.dropped == 1 else f"{question.dropped} turns are"
        terminal.note(f"the oldest {turns} forgotten: the context is full")
    completions, _ = terminal.answers(engine, [request], ["answer"])
    conversation.answer(completions[0].text)


def _read_line():
    if sys.stdin.isatty():
        return input("> ")
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
