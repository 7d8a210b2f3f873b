"""Run of an evaluation on this rank: all ranks do the same, rank 0 tells."""

import contextlib
import json
import os
import sys

from tqdm import tqdm

from mindspeed_ms.core import comm
from mindspeed_ms.core.logging import logger
from mindspeed_ms.inference.engine import Engine, encode
from mindspeed_ms.tasks.evaluation import generation, multiple_choice, perplexity
from mindspeed_ms.tasks.evaluation.shapes import shape_of
from mindspeed_ms.tools.evaluate.command import GSM8K, PERPLEXITY
from mindspeed_ms.tools.model_command.loading import chatter_to_stderr, load_model


def run(job, plan):
    """Evaluate (EvaluateJob, Plan); all ranks call it. Returns the exit status."""
    prepared = _prepare(job, plan)  # what is wrong with the data is found before the model is loaded
    with chatter_to_stderr():
        loaded = load_model(job)
    if comm.get_rank() == 0:
        sys.stderr.writelines(f"evaluation.py: note: {note}\n" for note in job.notes)
    with _progress(job, prepared) as progress:
        text, result = _evaluate(job, plan, loaded.runner, prepared, progress)
    if comm.get_rank() == 0:
        sys.stdout.write(f"{text}\n")
        if job.output is not None:
            _write(job.output, {"task": job.task, "load": job.checkpoint, "data": job.paths, "shots": job.shots, **result})
    return 0


def _prepare(job, plan):
    """Documents, contexts or prompts of a job."""
    if job.task == PERPLEXITY:
        return {path: perplexity.documents_of(path, plan.tokenizer) for path in job.paths}
    if job.task != GSM8K:
        return multiple_choice.contexts_of(job.questions, shape_of(job.task), job.examples, job.shots)
    prompts = generation.prompts_of(job.questions, job.examples, job.shots)
    if plan.template is None:
        return [encode(prompt, plan.tokenizer) for prompt in prompts]
    system = [{"role": "system", "content": job.system}] if job.system else []
    return [tuple(plan.template([*system, {"role": "user", "content": prompt}])) for prompt in prompts]


def _evaluate(job, plan, runner, prepared, progress):
    """(text, json) of the results."""
    if job.task == PERPLEXITY:
        results = {
            path: perplexity.evaluate(runner, documents, job.batch_size, job.window, job.stride, progress)
            for path, documents in prepared.items()
        }
        text = "\n\n".join(f"{path}\n{perplexity.as_text(result)}" for path, result in results.items())
        return text, {"results": results}
    if job.task == GSM8K:
        engine = Engine(runner, plan.tokenizer, plan.eos_ids)
        table, details = generation.evaluate(engine, job.questions, prepared, job.max_new_tokens, progress)
    else:
        table, details = multiple_choice.evaluate(runner, plan.tokenizer, job.questions, prepared, job.batch_size, progress)
    return table.as_text(), {"results": table.as_json(), "details": details}


@contextlib.contextmanager
def _progress(job, prepared):
    """Progress bar of rank 0 in a terminal: a function that takes the number of things done."""
    if comm.get_rank() != 0 or not sys.stderr.isatty():
        yield None
        return
    total = None if job.task == PERPLEXITY else len(prepared)
    if job.task not in (PERPLEXITY, GSM8K):
        total = sum(len(question.choices) for question in job.questions)
    with tqdm(total=total, desc=job.task, file=sys.stderr) as bar:
        yield bar.update


def _write(path, content):
    """Write json; the file appears when it is complete."""
    unfinished = f"{path}.{os.getpid()}.incomplete"
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False, indent=1)
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(unfinished)
    logger.info("results are in %s", path)
