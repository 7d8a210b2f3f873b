"""Run of a job on this rank: load the model, do the tasks one after the other."""

import signal

from mindspeed_ms.core import comm
from mindspeed_ms.inference.beam_search import beam_search
from mindspeed_ms.inference.engine import Engine, seeded
from mindspeed_ms.inference.ranks import follow, lead
from mindspeed_ms.tools.generate.chat import chat
from mindspeed_ms.tools.generate.terminal import Interrupts, Terminal
from mindspeed_ms.tools.model_command.loading import chatter_to_stderr, load_model

INTERRUPTED = 130


def run(job, plan):
    """Do the tasks of a job (Job, Plan); all ranks call it. Returns the exit status."""
    is_alone = len(job.tasks) == 1
    with chatter_to_stderr():
        loaded = load_model(job, plan)
    terminal = Terminal(job.as_json)
    if comm.get_rank() != 0:  # Ctrl-C is rank 0's
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for task in job.tasks:
        engine = Engine(loaded.runner, plan.tokenizer, plan.eos_ids)
        if task.num_beams:
            is_interrupted = _search(loaded.runner, plan, task, terminal, is_alone)
        elif comm.get_rank() != 0:
            follow(engine)
            is_interrupted = False
        else:
            with lead(engine) as leader:
                is_interrupted = _lead(leader, job, plan, task, terminal, is_alone)
        if _from_rank_0(is_interrupted):
            return INTERRUPTED
    return 0


def _lead(engine, job, plan, task, terminal, is_alone):
    if task.is_chat:
        chat(engine, plan.template, task.params, terminal, job.system, job.history_turns)
        return False
    requests = plan.requests[task.name]
    titles = [
        _title(task, len(requests), number, task.params.n, sample, is_alone)
        for number in range(len(requests))
        for sample in range(task.params.n)
    ]
    if not is_alone and len(titles) == 1 and not job.as_json:
        terminal.write(f"=== {titles[0]} ===\n")
    completions, is_interrupted = terminal.answers(engine, requests, titles)
    if task.params.logprobs is not None and not job.as_json:
        for completion in completions:
            terminal.write("log-probabilities: " + " ".join(f"{score.logprob:.4f}" for score in completion.logprobs) + "\n")
    return is_interrupted


def _title(task, prompts, number, answers, sample, is_alone):
    parts = [] if is_alone else [task.name]
    parts += [f"prompt {number + 1}"] if prompts > 1 else []
    parts += [f"answer {sample + 1}"] if answers > 1 else []
    return ", ".join(parts) or task.name


def _search(runner, plan, task, terminal, is_alone):
    """Beam search for each prompt, on all ranks; returns whether Ctrl-C ended it."""
    requests = plan.requests[task.name]
    for number, request in enumerate(requests):
        params = _from_rank_0(seeded(request).params)
        with Interrupts() as interrupts:
            beams = beam_search(runner, request.prompt, params, task.num_beams, plan.eos_ids, task.length_penalty)
        if comm.get_rank() == 0:
            title = _title(task, len(requests), number, 1, 0, is_alone)
            terminal.beams(beams, plan.tokenizer, request.prompt, title, len(requests) > 1 or not is_alone)
        if _from_rank_0(interrupts.requested):
            return True
    return False


def _from_rank_0(value):
    return value if comm.get_world_size() == 1 else comm.world_group().broadcast_object(value, 0)
