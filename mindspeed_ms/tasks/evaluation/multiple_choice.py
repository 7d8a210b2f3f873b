"""Multiple choice: the most likely choice counts, with examples before the question if wanted."""

from mindspeed_ms.tasks.evaluation.errors import EvaluationError
from mindspeed_ms.tasks.evaluation.results import Table
from mindspeed_ms.tasks.evaluation.scoring import check_pair, encode_pair, likelihoods


def questions_of(records, shape):
    """Questions (list[Question]) of records.

    Raises:
        EvaluationError: a field is missing or wrong, a choice is empty; names file and line.
    """
    questions = [shape.question(record) for record in records]
    for question in questions:
        empty = next((number for number, choice in enumerate(question.choices, 1) if not choice.strip()), None)
        if empty is not None:
            raise EvaluationError(f"{question.place}: choice {empty} is empty: expected some text.")
    return questions


def contexts_of(questions, shape, examples=(), shots=0):
    """Text before the choices of each question: heading, `shots` examples of its category, its own context.

    Args:
        questions (list[Question]): the questions.
        shape (Shape): their shape.
        examples (list[Question]): questions to show with their answers: those of the same category, or all where no
            question has one of their categories.
        shots (int): how many.

    Raises:
        EvaluationError: fewer examples than `shots`.
    """
    by_category = {}
    for example in examples:
        by_category.setdefault(example.category, []).append(example)
    has_categories = any(question.category in by_category for question in questions)
    contexts = []
    for question in questions:
        shown = (by_category.get(question.category, []) if has_categories else list(examples))[:shots]
        if len(shown) < shots:
            raise EvaluationError(
                f"{question.place}: {shots} examples are wanted, but there are {len(shown)} of category {question.category!r}."
            )
        parts = [example.context + example.choices[example.answer] for example in shown]
        contexts.append(shape.heading(question.category) + "\n\n".join([*parts, question.context]))
    return contexts


def pairs_of(tokenizer, questions, contexts, limits):
    """Ids of the context and of the choice, for each choice of each question: list of (list[int], list[int]).

    Args:
        tokenizer (Tokenizer): the model's.
        questions (list[Question]), contexts (list[str]): see `contexts_of`.
        limits: with `max_sequence_length` and `vocab_size`: a ModelRunner, or a Checkpoint before it is loaded.

    Raises:
        EvaluationError: a choice without tokens or longer than the context of the model, an id out of its vocabulary; names
            file and line.
    """
    pairs = []
    for question, context in zip(questions, contexts):
        for choice in question.choices:
            try:
                pairs.append(encode_pair(tokenizer, context, choice))
                check_pair(pairs[-1], limits)
            except EvaluationError as error:
                raise EvaluationError(f"{question.place}: {error}") from None
    return pairs


def evaluate(runner, questions, pairs, batch_size, progress=None):
    """Accuracy of a model: `acc` by log-likelihood, `acc_norm` by log-likelihood per byte of the choice.

    Args:
        runner (ModelRunner): the model.
        questions (list[Question]), pairs (list): see `pairs_of`.
        batch_size (int): sequences at a time.
        progress (Optional[Callable]): see `likelihoods`.

    Returns:
        (Table, list[dict]): accuracy by category; what was chosen for each question
    """
    found = iter(likelihoods(runner, pairs, batch_size, progress))
    table, details = Table(("acc", "acc_norm")), []
    for question in questions:
        choices = [next(found) for _ in question.choices]
        totals = [choice.total for choice in choices]
        per_byte = [choice.total / len(text.strip().encode()) for choice, text in zip(choices, question.choices)]
        chosen, chosen_norm = totals.index(max(totals)), per_byte.index(max(per_byte))
        table.add(question.category, acc=chosen == question.answer, acc_norm=chosen_norm == question.answer)
        table.cut += any(choice.is_cut for choice in choices)
        details.append(
            {
                "place": question.place,
                "answer": question.answer,
                "chosen": chosen,
                "chosen_norm": chosen_norm,
                "logprobs": totals,
            }
        )
    return table, details
