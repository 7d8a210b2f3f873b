"""Command line of inference.py: MindSpeed-LLM's flags. All other flags go to the configuration, as in training."""

from mindspeed_ms.spelling import SuggestingParser
from mindspeed_ms.tasks.preprocess.templates import FROM_TOKENIZER
from mindspeed_ms.tools.model_command import flags
from mindspeed_ms.tools.model_command.job import Job, JobError, Prompt, Task, flag_of

TASKS = "greedy", "do-sample", "beam-search", "beam-search-with-sampling", "return-output-log-probs", "chat"
GREEDY, SAMPLE, BEAMS, BEAM_SAMPLE, SCORES, CHAT = TASKS
_DRAWING = (SAMPLE, BEAM_SAMPLE, CHAT)
_SEARCHING = (BEAMS, BEAM_SAMPLE)
# MindSpeed-LLM's defaults
_PROMPT, _SAMPLING, _BEAMS, _TURNS = "how are you?", {"temperature": 0.7, "top_k": 50, "top_p": 0.95}, 2, 3


def parser():
    """The argparse.ArgumentParser; flags that it does not know are the configuration's."""
    result = SuggestingParser(
        prog="inference.py",
        description="Generate with a checkpoint, with MindSpeed-LLM's flags. Model and layout flags of training are known too.",
        allow_abbrev=False,
    )
    result.add_argument(
        "--task", nargs="+", choices=TASKS, type=_task_name, default=[GREEDY], help="ways to answer, one after the other"
    )
    flags.add_mindspeed_llm_flags(result)
    flags.add_prompt_flags(result)
    flags.add_sampling_flags(result, max_new_tokens=128, **_SAMPLING)
    result.add_argument("--max-length", type=int, metavar="N", help="longest prompt and answer together")
    result.add_argument("--num-beams", type=int, metavar="N", help=f"beams of beam search ({_BEAMS})")
    result.add_argument("--length-penalty", type=float, metavar="X", help="of beam search; above 0 favours long answers (1)")
    result.add_argument("--hf-chat-template", action="store_true", help="put prompts into the chat template of the folder")
    flags.add_conversation_flags(result)
    result.add_argument("--add-eos-token", nargs="+", default=[], metavar="TOKEN", help="further end tokens, or their ids")
    result.add_argument("--eos-id", type=int, action="append", default=[], metavar="ID", help="a further end token")
    return result


def job_of(arguments):
    """Job of a command line (list[str]).

    Raises:
        JobError: flags that contradict each other, a value out of its range.
    """
    options, others = parser().parse_known_args(arguments)
    typed = flags.typed_params(options)
    _check(options, typed)
    prompts = flags.prompts_of(options)
    if options.max_length is not None and not options.max_length > 0:
        raise JobError(f"--max-length is {options.max_length}: expected an integer > 0.")
    tasks = [_task(name, options, typed) for name in dict.fromkeys(options.task)]
    lengths = sorted(value for value in (options.seq_length, options.max_length) if value is not None)
    shared = flags.mindspeed_llm_arguments(options, others)
    if options.hf_chat_template or (CHAT in options.task and options.prompt_type is None):
        shared["prompt_type"] = FROM_TOKENIZER
    shared["history_turns"] = _TURNS if options.history_turns is None else options.history_turns
    return Job(
        tasks=tasks,
        prompts=prompts or [Prompt(_PROMPT)],
        added_ends=[*options.add_eos_token, *options.eos_id],
        max_sequence_length=min(lengths, default=None),
        length_flag="--max-length" if options.max_length in lengths[:1] else "--seq-length",
        **shared,
    )


def _task_name(text):
    return text.replace("_", "-")  # older spellings: do_sample


def _task(name, options, typed):
    values = {"max_new_tokens": None} | (_SAMPLING if name in _DRAWING else {"temperature": 0.0})
    of_other_tasks = () if name in _DRAWING else flags.SHAPING
    values |= {key: value for key, value in typed.items() if key not in of_other_tasks}
    if name == SCORES:
        values["logprobs"] = 0
    beams = (_BEAMS if options.num_beams is None else options.num_beams) if name in _SEARCHING else None
    penalty = 1.0 if options.length_penalty is None else options.length_penalty
    return Task(name, flags.sampling_params(**values), beams, penalty, name == CHAT)


def _check(options, typed):
    tasks = ", ".join(options.task)
    drawn = [name for name in flags.SHAPING if name in typed]
    if drawn and not set(options.task) & set(_DRAWING):
        raise JobError(
            f"{flag_of(drawn[0])} {typed[drawn[0]]} is for --task {', '.join(_DRAWING)}, but --task is {tasks}: leave it out."
        )
    for name in ("num_beams", "length_penalty"):
        if getattr(options, name) is not None and not set(options.task) & set(_SEARCHING):
            flag = flag_of(name)
            raise JobError(f"{flag} is for --task {', '.join(_SEARCHING)}, but --task is {tasks}: leave it out.")
    if options.num_beams is not None and options.num_beams < 1:
        raise JobError(f"--num-beams is {options.num_beams}: expected an integer >= 1.")
    if options.max_length is not None and "max_new_tokens" in typed:
        raise JobError("--max-length and --max-new-tokens both limit the answer: leave one of them out.")
    if options.history_turns is not None and CHAT not in options.task:
        raise JobError(f"--history-turns is for --task {CHAT}, but --task is {tasks}: leave it out.")
    if set(options.task) == {CHAT} and (options.prompt or options.prompt_file):
        raise JobError(f"--task {CHAT} takes its questions from the terminal: leave --prompt and --prompt-file out.")
    has_template = options.hf_chat_template or options.prompt_type or options.system or CHAT in options.task
    if options.enable_thinking is not None and not has_template:
        raise JobError("--enable-thinking is of a chat template: give --hf-chat-template or --prompt-type too.")
