"""Command line of tools.generate."""

from mindspeed_ms.spelling import SuggestingParser
from mindspeed_ms.tools.model_command import flags
from mindspeed_ms.tools.model_command.job import DEFAULT_NEW_TOKENS, Job, JobError, Task

PROGRAM = "python -m mindspeed_ms.tools.generate"


def parser():
    """The argparse.ArgumentParser."""
    result = SuggestingParser(
        prog=PROGRAM,
        description="Let a model continue texts, or chat with it. Greedy unless a flag of sampling is typed.",
        allow_abbrev=False,
    )
    result.add_argument("checkpoint", help="folder of a run, of a checkpoint (ours or Megatron's), or of Hugging Face")
    flags.add_prompt_flags(result)
    result.add_argument("--chat", action="store_true", help="chat in the terminal; Ctrl-C ends an answer, Ctrl-D the chat")
    flags.add_sampling_flags(result, max_new_tokens=f"{DEFAULT_NEW_TOKENS}, in a chat what fits", n=1)
    result.add_argument("--logprobs", type=int, metavar="N", help="log-probability of each token and N likeliest ones (--json)")
    result.add_argument("--prompt-logprobs", action="store_true", default=None, help="also of the prompt's tokens (--json)")
    result.add_argument("--num-beams", type=int, metavar="N", help="beam search")
    result.add_argument("--length-penalty", type=float, metavar="X", help="of beam search; above 0 favours long answers (1)")
    flags.add_conversation_flags(result)
    result.add_argument("--json", action="store_true", help="print a json line for each answer")
    flags.add_model_flags(result)
    return result


def job_of(arguments):
    """Job of a command line (list[str]).

    Raises:
        JobError: flags that contradict each other, a value out of its range.
    """
    options = parser().parse_args(arguments)
    typed = flags.typed_params(options)
    drawn = [name for name in flags.SHAPING if name in typed and name != "temperature"]
    if typed.get("temperature") == 0 and drawn:
        raise JobError(f"{flags.flag_of(drawn[0])} does nothing with --temperature 0 (greedy): leave one of them out.")
    greedy = not drawn and "temperature" not in typed and (typed.get("n", 1) == 1 or options.num_beams)
    params = flags.sampling_params(**{"temperature": 0.0 if greedy else 1.0, "max_new_tokens": None} | typed)
    prompts = flags.prompts_of(options)
    if options.chat == bool(prompts):
        raise JobError(
            "--chat takes its questions from the terminal: leave --prompt and --prompt-file out."
            if options.chat
            else "nothing to continue: give --prompt TEXT, --prompt-file FILE or --chat."
        )
    if options.length_penalty is not None and not options.num_beams:
        raise JobError("--length-penalty is of beam search: give --num-beams too.")
    if options.num_beams is not None and (options.chat or options.num_beams < 1):
        expected = "a chat uses no beam search, leave it out." if options.chat else "expected an integer >= 1."
        raise JobError(f"--num-beams is {options.num_beams}: {expected}")
    for name in ("logprobs", "prompt_logprobs"):
        if name in typed and not options.json:
            raise JobError(f"{flags.flag_of(name)} is only printed with --json: add it.")
    if options.json and options.chat:
        raise JobError("--json is for --prompt and --prompt-file: leave it out of a chat.")
    _check_conversation(options)
    penalty = 1.0 if options.length_penalty is None else options.length_penalty
    task = Task("chat" if options.chat else "prompts", params, options.num_beams, penalty, options.chat)
    return Job(
        options.checkpoint,
        [task],
        prompts,
        iteration=options.iteration,
        adapter=options.adapter,
        as_json=options.json,
        dtype=options.dtype,
        max_sequence_length=options.max_sequence_length,
        **flags.model_arguments(options),
    )


def _check_conversation(options):
    if options.prompt_type_path and options.prompt_type in (None, "chat_template"):
        raise JobError("--prompt-type-path needs --prompt-type, the name of a template in that file.")
    if options.history_turns is not None and not options.chat:
        raise JobError("--history-turns is of a chat: give --chat too, or leave it out.")
    if options.enable_thinking is not None and not (options.chat or options.prompt_type or options.system):
        raise JobError("--enable-thinking is of a chat template: give --chat or --prompt-type too.")
