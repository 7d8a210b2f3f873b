"""Generation tasks: the model writes, a rule takes the answer out of its text (GSM8K shape)."""

import re
from dataclasses import dataclass

from mindspeed_ms.inference.engine import check
from mindspeed_ms.inference.requests import Request
from mindspeed_ms.inference.sampling import RequestError, SamplingParams
from mindspeed_ms.tasks.evaluation.errors import EvaluationError
from mindspeed_ms.tasks.evaluation.results import Table

_STRICT = re.compile(r"#### *(-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


@dataclass(frozen=True)
class Problem:
    """A problem to solve in writing: question, whole solution, its final answer (texts), category, place."""

    question: str
    solution: str
    answer: str
    category: str
    place: str


def problems_of(records):
    """Problems (list[Problem]) of records of GSM8K's shape: question, answer that ends with "#### NUMBER".

    Raises:
        EvaluationError: a field is missing; the answer has no such end.
    """
    problems = []
    for record in records:
        solution = record.text("answer")
        found = _STRICT.findall(solution)
        if not found:
            raise EvaluationError(f"{record.place}: 'answer' does not end with '#### NUMBER'.")
        category = record.text("category", "subject", is_optional=True) or record.subject
        problems.append(Problem(record.text("question"), solution, normalized(found[-1]), category, record.place))
    return problems


def normalized(number):
    """A number as text without thousands separators, currency and a closing point."""
    text = number.replace(",", "").replace("$", "").rstrip(".")
    return text[:-2] if re.fullmatch(r"-?\d+\.0", text) else text


def extract(text):
    """(strict, flexible) answers of a generated text: the number after "####", the last number; None if there is none."""
    strict, numbers = _STRICT.search(text), [found for found in _NUMBER.findall(text) if any(one.isdigit() for one in found)]
    return (normalized(strict[1]) if strict else None), (normalized(numbers[-1]) if numbers else None)


def prompts_of(problems, examples, shots):
    """Prompt of each problem, after `shots` examples (list[Problem]).

    Raises:
        EvaluationError: fewer examples than `shots`.
    """
    if len(examples) < shots:
        raise EvaluationError(f"{shots} examples are wanted, but there are {len(examples)}.")
    shown = [f"Question: {example.question}\nAnswer: {example.solution}" for example in examples[:shots]]
    return ["\n\n".join([*shown, f"Question: {problem.question}\nAnswer:"]) for problem in problems]


def requests_of(problems, prompts, max_new_tokens, limits, tokenizer):
    """Requests (list[Request]) of greedy answers.

    Args:
        problems (list[Problem]): the problems.
        prompts (list[sequence[int]]): ids before each answer.
        max_new_tokens (int): longest answer.
        limits, tokenizer: as of `inference.engine.check`.

    Raises:
        EvaluationError: prompt and answer do not fit into the context; names file and line.
    """
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, stop=("Question:", "\n\n\n"))
    requests = [Request(tuple(prompt), params) for prompt in prompts]
    for request, problem in zip(requests, problems):
        try:
            check(request, limits, tokenizer)
        except RequestError as error:
            raise EvaluationError(f"{problem.place}: {error}") from None
    return requests


def evaluate(engine, problems, requests, progress=None):
    """Share of problems whose answer is right, by greedy generation.

    Args:
        engine (Engine): see `inference`.
        problems (list[Problem]), requests (list[Request]): see `requests_of`.
        progress (Optional[Callable]): called with the number of answers that are done.

    Returns:
        (Table, list[dict]): strict and flexible accuracy by category; text and answers of each problem
    """
    numbers = {engine.add(request): index for index, request in enumerate(requests)}
    texts, missing = [""] * len(problems), len(problems)
    while missing:
        for event in engine.step():
            texts[numbers[event.request]] += event.text
            if event.finish_reason:
                missing -= 1
                if progress:
                    progress(1)
    table, details = Table(("strict", "flexible")), []
    for problem, text in zip(problems, texts):
        strict, flexible = extract(text)
        table.add(problem.category, strict=strict == problem.answer, flexible=flexible == problem.answer)
        details.append({"place": problem.place, "answer": problem.answer, "strict": strict, "flexible": flexible, "text": text})
    return table, details
