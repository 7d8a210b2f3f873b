"""Streaming text: parts joined are the text, no broken UTF-8, stop texts are never shown."""

import random
from unittest.mock import patch

import pytest

from mindspeed_ms.inference.detokenize import REPLACEMENT, StopText, TextStream
from tests.inference.texts import BYTE, byte_fallback_tokenizer, byte_level_tokenizer

TEXTS = ["hello world", " well, then\n\n  done", "naïve 你好，世界 👩‍👩‍👧 🎉🎉 ć", "👋" * 9, "日本語" * 5]


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def tokenizer(request, tmp_path_factory):
    make = byte_level_tokenizer if request.param == "byte level" else byte_fallback_tokenizer
    return make(tmp_path_factory.mktemp("tokenizer"))


def parts(tokenizer, ids, prompt=()):
    stream = TextStream(tokenizer, prompt)
    return [*(stream.add(number) for number in ids), stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_parts_are_whole_characters_and_joined_the_text(tokenizer, text):
    ids = tokenizer.tokenize(text, add_special_tokens=False)
    found = parts(tokenizer, ids)
    assert "".join(found) == tokenizer.detokenize(ids) == text
    assert not any(REPLACEMENT in part for part in found)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["well", "你好", "a "])
def test_an_answer_goes_on_with_its_prompt(tokenizer, text, prompt):
    """The blank in front of an answer stays, though decoders drop it in front of a text."""
    ids, start = tokenizer.tokenize(prompt + text, False), tokenizer.tokenize(prompt, False)
    assert "".join(parts(tokenizer, ids[len(start) :], ids[: len(start)])) == text


def test_few_tokens_are_decoded_at_a_time(tokenizer):
    """However long an answer is, and if it is no text at all."""
    longest, decode = [], tokenizer.detokenize
    with patch.object(tokenizer, "detokenize", lambda ids: longest.append(len(ids)) or decode(ids)):
        parts(tokenizer, tokenizer.tokenize("hello world " * 20, add_special_tokens=False))
        assert max(longest) < 8
        byte = tokenizer.token_to_id("Ģ")  # 0x80
        parts(tokenizer, [BYTE + 0x80 if byte is None else byte] * 200)
        assert max(longest) < 80


def test_a_character_that_the_prompt_began(tokenizer):
    ids = tokenizer.tokenize("你", False)
    assert "".join(parts(tokenizer, ids[-1:], ids[:-1])) == "你"


def test_bytes_that_are_no_text_are_left_out(tokenizer):
    known = tokenizer.token_to_id("<0xFF>")
    bad = known if known is not None else tokenizer.tokenize("ÿ", False)[0]  # the first of two bytes
    ids = tokenizer.tokenize("hello", False)
    found = parts(tokenizer, [*ids, bad, *ids, bad])
    assert REPLACEMENT not in "".join(found)
    assert "".join(found).count("hello") == 2
    assert REPLACEMENT not in "".join(parts(tokenizer, [bad] * 100 + ids))
    assert "".join(parts(tokenizer, [bad] * 100 + ids)).endswith("hello")


def test_special_tokens_are_no_text_and_padding_of_the_vocabulary_neither(tokenizer):
    ids = tokenizer.tokenize("hello", False)
    found = "".join(parts(tokenizer, [*ids, tokenizer.eos, *ids, tokenizer.vocab_size + 3]))
    assert found.replace(" ", "") == "hellohello"


def test_any_order_of_tokens_gives_no_broken_text(tokenizer):
    draw = random.Random(3)
    for _ in range(40):
        ids = [draw.randrange(BYTE, tokenizer.vocab_size) for _ in range(60)]
        found = "".join(parts(tokenizer, ids))
        assert REPLACEMENT not in found
        found.encode("utf-8")


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (("STOP",), "go on STOP here", "go on ", "STOP"),
        (("STOP",), "go on STO", "go on STO", None),
        (("STOP",), "STSTOP", "ST", "STOP"),
        (("aab",), "aaab", "a", "aab"),
        (("abc", "b"), "xabc", "xa", "b"),
        (("bc", "abc"), "xabcd", "x", "abc"),
        (("\n\n", "User:"), "fine\n\nUser: no", "fine", "\n\n"),
        (("好",), "你好", "你", "好"),
        ((), "all of it", "all of it", None),
    ],
)
def test_stop_texts_are_cut_however_the_text_comes(stops, text, shown, matched):
    for size in range(1, len(text) + 1):
        stop, found = StopText(stops), ""
        for first in range(0, len(text), size):
            part = stop.add(text[first : first + size])
            found += part
            assert shown.startswith(found), "something was shown that is cut later"
            if stop.matched:
                break
        found += "" if stop.matched else stop.finish()
        assert (found, stop.matched) == (shown, matched)
