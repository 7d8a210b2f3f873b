"""Shapes of multiple-choice data (MMLU, CEval, BoolQ, HellaSwag, ...): from a record to a question with its choices.

Prompts are those of lm-evaluation-harness, so that figures can be compared.
"""

import re
from dataclasses import dataclass

from mindspeed_ms.spelling import did_you_mean
from mindspeed_ms.tasks.evaluation.errors import EvaluationError

LETTERS = "ABCDEFGHIJ"
_LETTER_COLUMNS = ("question", "A", "B", "C", "D", "answer")


@dataclass(frozen=True)
class Question:
    """A question with choices.

    Attributes:
        context (str): text before the choices.
        choices (tuple[str, ...]): continuations, each with the space that it begins with.
        answer (int): index of the right one.
        category (str): row of the table.
        place (str): where it comes from.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    category: str
    place: str


@dataclass(frozen=True)
class Shape:
    """A shape of data.

    Attributes:
        question (Callable): Record -> Question.
        heading (Callable): category -> text before all examples (str).
        columns (Optional[tuple[str, ...]]): of csv files without a header.
    """

    question: object
    heading: object = lambda category: ""
    columns: tuple | None = None


def shape_of(name):
    """The Shape of a name.

    Raises:
        EvaluationError: unknown, with the nearest name.
    """
    if name not in SHAPES:
        raise EvaluationError(f"{name!r} is no task: expected one of {', '.join(SHAPES)}.{did_you_mean(name, SHAPES)}")
    return SHAPES[name]


def answer_index(record, value, count):
    """Index (int) of the right choice, from an index, its text, or a letter.

    Raises:
        EvaluationError: out of the choices.
    """
    letter = value.strip().upper() if isinstance(value, str) else ""
    if len(letter) == 1 and letter in LETTERS:
        index = LETTERS.index(letter)
    elif isinstance(value, bool) or not isinstance(value, (int, str)) or not re.fullmatch(r"\d+", str(value).strip()):
        raise EvaluationError(f"{record.place}: the answer is {value!r}: expected a choice's number from 0, or letter.")
    else:
        index = int(value)
    if index >= count:
        raise EvaluationError(f"{record.place}: the answer is {value!r}, but there are {count} choices.")
    return index


def _lettered(record, choices, question, answer_word, category):
    lines = [question.strip(), *(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices)), answer_word]
    letters = tuple(f" {letter}" for letter in LETTERS[: len(choices)])
    answer = answer_index(record, record.value("answer"), len(choices))
    return Question("\n".join(lines), letters, answer, category, record.place)


def _choices(record):
    """The choices: a list `choices`, or the fields A, B, C, ..."""
    if "choices" in record.fields:
        choices = record.texts("choices")
        if len(choices) > len(LETTERS):
            raise EvaluationError(f"{record.place}: {len(choices)} choices, expected at most {len(LETTERS)}.")
        return choices
    letters = [letter for letter in LETTERS if record.fields.get(letter) is not None]
    if len(letters) < 2 or letters != list(LETTERS[: len(letters)]):
        raise EvaluationError(
            f"{record.place}: expected a list 'choices' or the fields A, B, ...; there are {sorted(record.fields)}."
        )
    return [str(record.fields[letter]) for letter in letters]


def _subject(record):
    return record.text("subject", "category", is_optional=True) or record.subject


def _mmlu(record):
    return _lettered(record, _choices(record), record.text("question"), "Answer:", _subject(record))


def _ceval(record):
    return _lettered(record, _choices(record), record.text("question"), "答案：", _subject(record))


def _boolq(record):
    question, passage, answer = record.text("question"), record.text("passage"), record.value("answer", "label")
    if answer not in (True, False, 0, 1) or isinstance(answer, float):
        raise EvaluationError(f"{record.place}: the answer is {answer!r}: expected true or false.")
    context = f"{passage}\nQuestion: {question.rstrip('?')}?\nAnswer:"
    return Question(context, (" no", " yes"), int(answer), _category(record, "boolq"), record.place)


def _hellaswag(record):
    label, first = record.text("activity_label", is_optional=True), record.text("ctx_a", is_optional=True)
    if first is None:
        context = record.text("ctx")
    else:
        context = first + " " + (record.text("ctx_b", is_optional=True) or "").capitalize()
    context = _cleaned(f"{label}: {context}" if label else context)
    endings = tuple(" " + _cleaned(ending) for ending in record.texts("endings"))
    answer = answer_index(record, record.value("label"), len(endings))
    return Question(context, endings, answer, _category(record, label or "hellaswag"), record.place)


def _cleaned(text):
    """Text without the marks of the WikiHow articles, as lm-evaluation-harness does."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _plain(record):
    """A question of one's own: `context` (or `question`), `choices`, `answer`, optional `category`."""
    choices = tuple(choice if choice[:1].isspace() else " " + choice for choice in record.texts("choices"))
    answer = record.value("answer", "label")
    texts = [choice.strip() for choice in choices]
    index = texts.index(answer.strip()) if isinstance(answer, str) and answer.strip() in texts else None
    index = answer_index(record, answer, len(choices)) if index is None else index
    return Question(record.text("context", "question"), choices, index, _category(record, record.subject), record.place)


def _category(record, default):
    return record.text("category", "subject", is_optional=True) or default


def _mmlu_heading(category):
    return f"The following are multiple choice questions (with answers) about {category.replace('_', ' ')}.\n\n"


def _ceval_heading(category):
    return f"以下是中国关于{category.replace('_', ' ')}的单项选择题，请选出其中的正确答案。\n\n"


SHAPES = {
    "mmlu": Shape(_mmlu, _mmlu_heading, _LETTER_COLUMNS),
    "ceval": Shape(_ceval, _ceval_heading, _LETTER_COLUMNS),
    "cmmlu": Shape(_ceval, _ceval_heading, _LETTER_COLUMNS),
    "boolq": Shape(_boolq),
    "hellaswag": Shape(_hellaswag),
    "multiple_choice": Shape(_plain),
}
