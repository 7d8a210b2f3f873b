"""Conversations: the prompt is the folder's template, the oldest turns go first, what does not fit is an error."""

import pytest

from mindspeed_ms.core.datasets.tokenizer.chat_template import TemplateError
from mindspeed_ms.inference.conversation import Conversation, jinja_prompt
from mindspeed_ms.inference.sampling import RequestError
from tests.preprocess.toy_tokenizer import toy_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return toy_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=TEMPLATE)


def letters(messages):
    """A template of one token for each letter."""
    return [ord(letter) for message in messages for letter in message["content"]]


def test_the_prompt_is_the_template(tokenizer):
    talk = Conversation(jinja_prompt(tokenizer), 200, 20, system="be kind")
    talk.ask("hi")
    talk.answer("yes?")
    ids = talk.ask("well").ids
    assert tokenizer.detokenize(ids) == (
        "<s><|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes?<|im_end|>\n"
        "<|im_start|>user\nwell<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(tokenizer.bos) == 1
    talk.answer("")
    assert [message["content"] for message in talk.messages] == ["hi", "yes?"]
    talk.clear()
    assert "hi" not in tokenizer.detokenize(talk.ask("new").ids)
    thoughtless = jinja_prompt(tokenizer, enable_thinking=False)([{"role": "user", "content": "hi"}])
    assert tokenizer.detokenize(thoughtless).endswith("<think></think>")


def test_the_oldest_turns_go_when_the_context_is_full():
    talk = Conversation(letters, 20, 5, system="S")
    for question, answer, dropped in (("abcd", "efgh", 0), ("ij", "kl", 0), ("m", "n", 0), ("opq", "r", 1), ("s", "t", 0)):
        question = talk.ask(question)
        assert question.dropped == dropped
        assert len(question.ids) <= 15
        talk.answer(answer)
    assert "".join(message["content"] for message in talk.messages) == "ijklmnopqrst"
    with pytest.raises(RequestError) as error:
        talk.ask("x" * 15)
    assert str(error.value) == "prompt has 16 tokens with the template, but 15 fit beside an answer: shorten it."
    assert "".join(message["content"] for message in talk.messages) == "ijklmnopqrst", "the history stays"
    assert talk.ask("x" * 3).dropped == 1, "one token too many"
    talk.answer("")
    assert talk.ask("x" * 14).dropped == 3


def test_no_more_turns_than_asked_for():
    talk = Conversation(letters, 1000, 5, history_turns=1)
    for number in range(4):
        assert talk.ask(f"q{number}").dropped == 0, "there is room"
        talk.answer(f"a{number}")
    assert "".join(map(chr, talk.ask("?").ids)) == "q3a3?"
    talk = Conversation(letters, 1000, 5, history_turns=0)
    talk.ask("one")
    talk.answer("two")
    assert "".join(map(chr, talk.ask("three").ids)) == "three"


def test_templates_that_are_missing_or_refuse(tmp_path, tokenizer):
    with pytest.raises(TemplateError, match=r"^a conversation needs a chat template, but the tokenizer .*json has none\.$"):
        jinja_prompt(toy_tokenizer(tmp_path))
    refusing = toy_tokenizer(tmp_path, chat_template="{{ raise_exception('no ' + messages[0].role) }}")
    with pytest.raises(TemplateError, match="refuses the conversation: no user"):
        jinja_prompt(refusing)([{"role": "user", "content": "hi"}])
