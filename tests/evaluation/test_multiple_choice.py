"""Multiple choice: exact accuracy of a model that knows the answers, prompts of lm-evaluation-harness, errors."""

import contextlib
import json

import pytest

from mindspeed_ms.tasks.evaluation.errors import EvaluationError
from mindspeed_ms.tasks.evaluation.multiple_choice import contexts_of, evaluate, pairs_of, questions_of
from mindspeed_ms.tasks.evaluation.records import read_records
from mindspeed_ms.tasks.evaluation.shapes import SHAPES, shape_of
from mindspeed_ms.testing.inference import TableRunner
from tests.inference.texts import byte_level_tokenizer

RECORDS = {
    "mmlu": {"question": " How many? ", "choices": ["one", "two", "three", "four"], "answer": 2, "subject": "high_school_math"},
    "ceval": {"id": 0, "question": "几个？", "A": "一", "B": "二", "C": "三", "D": "四", "answer": "C"},
    "boolq": {"question": "is it so", "title": "T", "passage": "It is.", "answer": True},
    "hellaswag": {
        "activity_label": "Dancing",
        "ctx_a": "A man [title] stands.",
        "ctx_b": "he",
        "ctx": "A man stands. he",
        "endings": ["sits.", "dances  [step] well.", "sings.", "runs."],
        "label": "1",
    },
    "multiple_choice": {"context": "2 + 2 =", "choices": ["3", "4"], "answer": "4", "category": "sums"},
}
PROMPTS = {
    "mmlu": (
        "The following are multiple choice questions (with answers) about high school math.\n\n"
        "How many?\nA. one\nB. two\nC. three\nD. four\nAnswer:",
        (" A", " B", " C", " D"),
        2,
    ),
    "ceval": (
        "以下是中国关于data的单项选择题，请选出其中的正确答案。\n\n几个？\nA. 一\nB. 二\nC. 三\nD. 四\n答案：",
        (" A", " B", " C", " D"),
        2,
    ),
    "boolq": ("It is.\nQuestion: is it so?\nAnswer:", (" no", " yes"), 1),
    "hellaswag": ("Dancing: A man. stands. He", (" sits.", " dances  well.", " sings.", " runs."), 1),
    "multiple_choice": ("2 + 2 =", (" 3", " 4"), 1),
}


def write(folder, records, name="data_test.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    (folder / name).write_text(text + "\n\n", encoding="utf-8")
    return str(folder / name)


@pytest.mark.parametrize("name", RECORDS)
def test_prompts(tmp_path, name):
    shape = shape_of(name)
    questions = questions_of(read_records(write(tmp_path, [RECORDS[name]])), shape)
    (context,) = contexts_of(questions, shape)
    assert (context, questions[0].choices, questions[0].answer) == PROMPTS[name]


@pytest.mark.parametrize("header", [False, True])
def test_csv_files_of_a_folder(tmp_path, header):
    lines = ["question,A,B,C,D,answer"] if header else []
    lines += ['"What, then?",1,2,3,4,D', "And?,5,6,7,8,A"]
    for name in ("anatomy_test.csv", "law_test.csv"):
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "README.md").write_text("no data")
    shape = shape_of("mmlu")
    questions = questions_of(read_records(str(tmp_path), shape.columns), shape)
    assert [(one.category, one.answer) for one in questions] == [("anatomy", 3), ("anatomy", 0), ("law", 3), ("law", 0)]
    assert questions[0].context.startswith("What, then?\nA. 1\n")


def test_examples_of_the_category_come_first(tmp_path):
    shape = shape_of("multiple_choice")
    many = [{**RECORDS["multiple_choice"], "context": f"{n} =", "category": "ab"[n % 2]} for n in range(6)]
    questions, examples = (questions_of(read_records(write(tmp_path, part)), shape) for part in (many[:2], many[2:]))
    assert contexts_of(questions, shape, examples, 2) == ["2 = 4\n\n4 = 4\n\n0 =", "3 = 4\n\n5 = 4\n\n1 ="]
    others = [{**record, "category": "c"} for record in many[2:]]
    examples = questions_of(read_records(write(tmp_path, others)), shape)
    assert contexts_of(questions, shape, examples, 1) == ["2 = 4\n\n0 =", "2 = 4\n\n1 ="]
    with pytest.raises(EvaluationError, match="line 1: 5 examples are wanted, but there are 4"):
        contexts_of(questions, shape, examples, 5)
    examples = questions_of(read_records(write(tmp_path, many[2::2])), shape)  # only of one of the questions' categories
    with pytest.raises(EvaluationError, match="line 2: 1 examples are wanted, but there are 0 of category 'b'"):
        contexts_of(questions, shape, examples, 1)


class KnowingRunner(TableRunner):
    """Model that gives each byte of one of the texts it knows a probability of a half."""

    def __init__(self, tokenizer, texts, **sizes):
        self.known = [tokenizer.tokenize(text) for text in texts]
        super().__init__(tokenizer.vocab_size, logits=self._next, **sizes)

    def _next(self, ids):
        logits = [0.0] * self.vocab_size
        for text in self.known:
            if len(text) > len(ids) and text[: len(ids)] == ids:
                logits[text[len(ids)]] = 8.0
        return logits


@pytest.mark.parametrize("batch_size", [1, 3])
def test_accuracy_is_exact(tmp_path, batch_size):
    """The model knows the answers of the first category and of half of the second."""
    tokenizer = byte_level_tokenizer(tmp_path / "tokenizer")
    shape = shape_of("multiple_choice")
    records = [
        {
            "context": f"Question {n}:",
            "choices": ["yes", "no", "maybe"],
            "answer": n % 3,
            "category": "easy" if n < 6 else "hard",
        }
        for n in range(12)
    ]
    questions = questions_of(read_records(write(tmp_path, records)), shape)
    known = [one.context + one.choices[one.answer if n < 9 else (one.answer + 1) % 3] for n, one in enumerate(questions)]
    runner = KnowingRunner(tokenizer, known)
    pairs = pairs_of(tokenizer, questions, contexts_of(questions, shape), runner)
    table, details = evaluate(runner, questions, pairs, batch_size)
    result = table.as_json()
    assert result["categories"]["easy"] == {"acc": 1.0, "acc_norm": 1.0, "count": 6}
    assert result["categories"]["hard"] == {"acc": 0.5, "acc_norm": 0.5, "count": 6}
    assert result["all"] == {"acc": 0.75, "acc_norm": 0.75, "count": 12} and result["cut"] == 0
    assert [one["chosen"] for one in details] == [n % 3 if n < 9 else (n + 1) % 3 for n in range(12)]
    lines = table.as_text().splitlines()
    assert lines[2].split() == ["easy", "6", "1.0000", "1.0000"] and lines[-1].split() == ["all", "12", "0.7500", "0.7500"]


def test_likelihood_per_byte_prefers_long_choices(tmp_path):
    tokenizer = byte_level_tokenizer(tmp_path / "tokenizer")
    shape = shape_of("multiple_choice")
    record = {"context": "Q", "choices": ["abcdefgh", "x"], "answer": 0}
    questions = questions_of(read_records(write(tmp_path, [record])), shape)
    runner = KnowingRunner(tokenizer, ["Q abcd"])
    table, _ = evaluate(runner, questions, pairs_of(tokenizer, questions, ["Q"], runner), 2)
    assert table.as_json()["all"] == {"acc": 0.0, "acc_norm": 1.0, "count": 1}
    record = {"context": "Q", "choices": ["üü", "abc"], "answer": 0}  # 4 bytes against 3, 2 characters against 3
    questions = questions_of(read_records(write(tmp_path, [record])), shape)
    runner = KnowingRunner(tokenizer, [])
    table, _ = evaluate(runner, questions, pairs_of(tokenizer, questions, ["Q"], runner), 2)
    assert table.as_json()["all"] == {"acc": 0.0, "acc_norm": 1.0, "count": 1}


def test_a_context_that_does_not_fit_loses_its_beginning(tmp_path):
    tokenizer = byte_level_tokenizer(tmp_path / "tokenizer")
    shape = shape_of("multiple_choice")
    record = {"context": "0123456789" * 3, "choices": ["a", "b"], "answer": 1}
    questions = questions_of(read_records(write(tmp_path, [record])), shape)
    runner = KnowingRunner(tokenizer, ["4567890123456789 b"], max_sequence_length=18)
    table, _ = evaluate(runner, questions, pairs_of(tokenizer, questions, contexts_of(questions, shape), runner), 4)
    assert table.as_json()["all"]["acc"] == 1.0 and table.cut == 1
    assert "1 contexts were longer" in table.as_text()
    for length, fits in ((16, True), (17, False)):  # with its blank; one token must stand before it
        questions = questions_of(read_records(write(tmp_path, [{**record, "choices": ["a" * length, "b"]}])), shape)
        with contextlib.nullcontext() if fits else pytest.raises(EvaluationError, match="line 1: a continuation has 18 tokens"):
            pairs_of(tokenizer, questions, contexts_of(questions, shape), runner)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("mmlu", {"answer": 4}, "the answer is 4, but there are 4 choices"),
        ("mmlu", {"answer": "E"}, "the answer is 'E', but there are 4 choices"),
        ("mmlu", {"answer": None}, "'answer' is missing"),
        ("mmlu", {"answer": 1.5}, "the answer is 1.5"),
        ("mmlu", {"answer": True}, "the answer is True"),
        ("mmlu", {"choices": "abcd"}, "'choices' is 'abcd'"),
        ("mmlu", {"choices": ["a"]}, "'choices' is ['a']"),
        ("mmlu", {"question": 5}, "'question' is 5: expected a text"),
        ("ceval", {"B": None}, "expected a list 'choices' or the fields A, B"),
        ("boolq", {"answer": "maybe"}, "expected true or false"),
        ("boolq", {"passage": None}, "'passage' is missing"),
        ("hellaswag", {"label": "7"}, "there are 4 choices"),
        ("hellaswag", {"endings": [1, 2]}, "'endings' is [1, 2]"),
        ("multiple_choice", {"answer": "5 apples"}, "the answer is '5 apples'"),
    ],
)
def test_wrong_records_name_file_and_line(tmp_path, name, fields, words):
    path = write(tmp_path, [RECORDS[name], {**RECORDS[name], **fields}])
    with pytest.raises(EvaluationError) as caught:
        questions_of(read_records(path), shape_of(name))
    assert f"{path}, line 2: " in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": ', "a.jsonl, line 2: no JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl, line 1: a JSON list, expected an object"),
        ("a.json", '{"a": 1}', "expected an array of objects"),
        ("a.json", '[\n{"a": 1},\n{]', "a.json, line 3: no JSON"),
        ("a.csv", "x,1,2,3,4,A\ny,1\n", "a.csv, line 2: 2 columns, expected 6"),
        ("a.jsonl", "\n", "holds no records"),
        ("a.jsonl", '{"a": 1}\n{"a": ["\\ud800"]}', "a.jsonl, line 2: character 9 of the text"),
        ("a.jsonl", b"\xff\xfe", "no UTF-8"),
        (None, "", "does not exist"),
    ],
)
def test_broken_files(tmp_path, name, text, words):
    path = tmp_path / (name or "nowhere")
    if name:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(EvaluationError) as caught:
        read_records(str(path), SHAPES["mmlu"].columns)
    assert words in str(caught.value)


def test_unknown_shape():
    with pytest.raises(EvaluationError, match="Did you mean 'hellaswag'"):
        shape_of("helaswag")
