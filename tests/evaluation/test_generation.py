"""Generation tasks and the adapter for lm-evaluation-harness."""

from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_ms.inference.engine import Engine
from mindspeed_ms.tasks.evaluation.errors import EvaluationError
from mindspeed_ms.tasks.evaluation.generation import evaluate, extract, problems_of, prompts_of, requests_of
from mindspeed_ms.tasks.evaluation.lm_harness import HarnessMethods
from mindspeed_ms.tasks.evaluation.records import read_records
from mindspeed_ms.tasks.evaluation.scoring import encode_pair
from mindspeed_ms.testing.inference import TableRunner
from tests.evaluation.test_multiple_choice import KnowingRunner, write
from tests.inference.texts import byte_level_tokenizer


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("It is 3 + 4 = 7.\n#### 7", "7", "7"),
        ("#### 1,234.00 and 5", "1234.00", "5"),
        ("The total is $1,000.", None, "1000"),
        ("#### -3.0", "-3", "-3"),
        ("no number, at all.", None, None),
    ],
)
def test_answers_are_taken_out_of_texts(text, strict, flexible):
    assert extract(text) == (strict, flexible)


def test_share_of_right_answers(tmp_path):
    records = [{"question": f"{n}+1?", "answer": f"It is.\n#### {n + 1}"} for n in range(4)]
    problems = problems_of(read_records(write(tmp_path, records)))
    tokenizer = byte_level_tokenizer(tmp_path / "tokenizer")
    prompts = prompts_of(problems[1:], problems[:1], 1)
    assert prompts[0] == "Question: 0+1?\nAnswer: It is.\n#### 1\n\nQuestion: 1+1?\nAnswer:"
    answers = [" #### 2\nQuestion: x", " so 3<|end|> 4", " #### 9\n\n\n5"]
    runner = KnowingRunner(tokenizer, [prompt + answer for prompt, answer in zip(prompts, answers)])
    engine = Engine(runner, tokenizer, (tokenizer.eos,))
    requests = requests_of(problems[1:], [tokenizer.tokenize(one) for one in prompts], 40, runner, tokenizer)
    table, details = evaluate(engine, problems[1:], requests)
    assert table.as_json()["all"] == {"strict": 1 / 3, "flexible": 2 / 3, "count": 3}
    assert [one["text"] for one in details] == [" #### 2\n", " so 3", " #### 9"]


def test_problems_without_answer_or_room(tmp_path):
    with pytest.raises(EvaluationError, match="line 1: 'answer' does not end with"):
        problems_of(read_records(write(tmp_path, [{"question": "a", "answer": "7"}])))
    problems = problems_of(read_records(write(tmp_path, [{"question": "a", "answer": "#### 7"}])))
    (twice,) = problems_of(read_records(write(tmp_path, [{"question": "a", "answer": "#### 5 is wrong\n#### 7"}])))
    assert twice.answer == "7"
    with pytest.raises(EvaluationError, match=r"line 1: .*context"):
        requests_of(problems, [list(range(20))], 8, TableRunner(64, 16), byte_level_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(EvaluationError, match="3 examples are wanted, but there are 1"):
        prompts_of(problems, problems, 3)


def test_the_harness_gets_likelihoods_and_texts(tmp_path):
    tokenizer = byte_level_tokenizer(tmp_path / "tokenizer")
    runner = KnowingRunner(tokenizer, ["The sky is blue.<|end|>"], max_sequence_length=32)
    model = HarnessMethods(Engine(runner, tokenizer, (tokenizer.eos,)))

    def asked(*arguments):
        return SimpleNamespace(args=arguments)

    (blue, blue_greedy), (red, red_greedy) = model.loglikelihood([asked("The sky is", " blue."), asked("The sky is", " red.")])
    assert blue_greedy and not red_greedy and blue > red
    ids = tokenizer.tokenize("The sky is blue.")
    direct = runner.score([ids], [len(tokenizer.tokenize("The sky is"))])[0].log_probabilities.sum()
    assert np.isclose(blue, direct)
    settings = {"until": ["e."], "max_gen_toks": 10, "do_sample": False}
    assert model.generate_until([asked("The sky is", settings)]) == [" blu"]
    text = "x" * 70
    (rolling,) = model.loglikelihood_rolling([asked(text)])
    assert np.isclose(rolling, 70 * -np.log(tokenizer.vocab_size))
    assert model.loglikelihood([asked("", "ab")])[0][0] == pytest.approx(2 * -np.log(tokenizer.vocab_size))


def test_pairs_are_cut_at_tokens(tmp_path):
    tokenizer = byte_level_tokenizer(tmp_path / "tokenizer", merges=[("b", "c")])
    assert encode_pair(tokenizer, "ab", "cd") == (tokenizer.tokenize("a") + tokenizer.tokenize("bc"), tokenizer.tokenize("d"))
    context, continuation = encode_pair(tokenizer, "The end  ", "now")
    assert tokenizer.detokenize(context) == "The end" and tokenizer.detokenize(continuation) == "  now"
    with pytest.raises(EvaluationError, match="adds no token"):
        encode_pair(tokenizer, "ab", "")
