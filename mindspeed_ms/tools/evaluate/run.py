"""Run of an evaluation on this rank: all ranks do the same, rank 0 tells."""

import contextlib
import json
import os
import sys

from tqdm import tqdm

from mindspeed_ms.core import comm
from mindspeed_ms.core.logging import logger
from mindspeed_ms.inference.engine import Engine
from mindspeed_ms.tasks.evaluation import generation, multiple_choice, perplexity
from mindspeed_ms.tools.evaluate.command import GSM8K, PERPLEXITY
from mindspeed_ms.tools.model_command.loading import chatter_to_stderr, load_model


def run(job, plan):
    """Evaluate (EvaluateJob, Plan); all ranks call it. Returns the exit status."""
    with chatter_to_stderr():
        loaded = load_model(job, plan)
    if comm.get_rank() == 0:
        sys.stderr.writelines(f"evaluation.py: note: {note}\n" for note in job.notes)
    with _progress(job, plan.prepared) as progress:
        text, result = _evaluate(job, plan, loaded.runner, plan.prepared, progress)
    if comm.get_rank() == 0:
        sys.stdout.write(f"{text}\n")
        if job.output is not None:
            _write(job.output, {"task": job.task, "load": job.checkpoint, "data": job.paths, "shots": job.shots, **result})
    return 0


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
        table, details = generation.evaluate(engine, job.questions, prepared, progress)
    else:
        table, details = multiple_choice.evaluate(runner, job.questions, prepared, job.batch_size, progress)
    return table.as_text(), {"results": table.as_json(), "details": details}


@contextlib.contextmanager
def _progress(job, prepared):
    """Progress bar of rank 0 in a terminal: a function that takes the number of things done."""
    if comm.get_rank() != 0 or not sys.stderr.isatty():
        yield None
        return
    total = None if job.task == PERPLEXITY else len(prepared)
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
