"""Work of an evaluation: documents, pairs of contexts and choices, or requests, checked before the model is loaded.

Imports no MindSpore.
"""

from mindspeed_ms.inference.sampling import RequestError
from mindspeed_ms.tasks.evaluation import generation, multiple_choice, perplexity
from mindspeed_ms.tasks.evaluation.shapes import shape_of

PERPLEXITY, GSM8K = "perplexity", "gsm8k"


def prepare(job, plan):
    """Documents of each path (dict), pairs of ids (list) or Requests (list) of an EvaluateJob with its Plan.

    Raises:
        EvaluationError, DatasetError: data that cannot be read or do not fit the model.
        RequestError: a setting that does not fit them.
    """
    limits = plan.checkpoint
    if job.task == PERPLEXITY:
        found = {path: perplexity.documents_of(path, plan.tokenizer) for path in job.paths}
        for documents in found.values():
            perplexity.check(documents, limits, job.window, job.stride)
        return found
    if job.task != GSM8K:
        contexts = multiple_choice.contexts_of(job.questions, shape_of(job.task), job.examples, job.shots)
        return multiple_choice.pairs_of(plan.tokenizer, job.questions, contexts, limits)
    room = limits.max_sequence_length
    if job.max_new_tokens >= room:
        raise RequestError(
            "max_new_tokens", f"is {job.max_new_tokens}, but the context of {room} holds question and answer: lower it."
        )
    prompts = [plan.ids(text, job.system) for text in generation.prompts_of(job.questions, job.examples, job.shots)]
    return generation.requests_of(job.questions, prompts, job.max_new_tokens, limits, plan.tokenizer)
