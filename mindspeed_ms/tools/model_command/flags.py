"""Flags that the commands share, MindSpeed-LLM's too, and how they become SamplingParams and arguments of Job."""

import argparse

from mindspeed_ms.inference.sampling import RequestError, SamplingParams
from mindspeed_ms.tasks.preprocess.templates import FROM_TOKENIZER
from mindspeed_ms.tools.model_command.job import SIZES, JobError

SHAPING = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Parameters that only matter where tokens are drawn."""


def add_prompt_flags(parser):
    """Add the flags that give prompts."""
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a text to continue; may be repeated")
    parser.add_argument("--prompt-file", metavar="FILE", help="text file with a prompt in each line; empty lines are left out")


def add_sampling_flags(parser, **defaults):
    """Add the flags of SamplingParams; their Namespace values are None unless typed. `defaults` are named in the help."""
    texts = {
        "max_new_tokens": (int, "longest answer in tokens"),
        "temperature": (float, "divides the logits; 0: the likeliest token (greedy)"),
        "top_k": (int, "draw among the k likeliest tokens; 0: all"),
        "top_p": (float, "draw among the likeliest tokens that have this probability together; 1: all"),
        "min_p": (float, "draw among tokens at least this many times as likely as the likeliest; 0: all"),
        "repetition_penalty": (float, "divides positive and multiplies negative logits of tokens that were there; 1: none"),
        "presence_penalty": (float, "subtracted from the logits of tokens that are in the answer"),
        "frequency_penalty": (float, "subtracted from the logits of tokens in the answer, times their count"),
        "seed": (int, "same seed, same answer, in every layout and batch"),
        "n": (int, "answers for each prompt"),
    }
    for name, (kind, text) in texts.items():
        said = f"{text} (default: {defaults[name]})" if name in defaults else text
        parser.add_argument("--" + name.replace("_", "-"), type=kind, metavar="N" if kind is int else "X", help=said)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="a text that ends an answer; may be repeated")
    stop_id = {"dest": "stop_token_ids", "type": int, "action": "append", "metavar": "ID"}
    parser.add_argument("--stop-token-id", help="a token that ends an answer; may be repeated", **stop_id)
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="the model's end tokens do not end an answer")


def add_size_flags(parser):
    """Add the flags that say over how many ranks the model is cut: `SIZES` of a job."""
    texts = {
        "tensor-model": "ranks that share each layer",
        "pipeline-model": "ranks that share the layers",
        "expert-model": "ranks that share the experts of a layer",
        "expert-tensor": "ranks that share each expert; default: as the other layers",
    }
    for name, text in texts.items():
        default = None if name == "expert-tensor" else 1
        parser.add_argument(f"--{name}-parallel-size", type=int, default=default, metavar="N", help=text)


def add_model_flags(parser):
    """Add the flags that say how the model is loaded."""
    add_size_flags(parser)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="of computation and cache; default: the checkpoint's")
    parser.add_argument("--max-sequence-length", type=int, metavar="N", help="context; default: the model's, at most 8192")
    add_adapter_flag(parser)
    parser.add_argument("--iteration", type=int, metavar="N", help="of the checkpoints of a run; default: the newest")


def add_mindspeed_llm_flags(parser):
    """Add MindSpeed-LLM's flags that say how the model is loaded."""
    parser.add_argument("--load", required=True, metavar="FOLDER", help="checkpoint: ours, Megatron's or Hugging Face's")
    add_adapter_flag(parser)
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration of a run's checkpoints; default: the newest")
    parser.add_argument("--use-kv-cache", action="store_true", help="always on")
    add_size_flags(parser)
    parser.add_argument("--seq-length", type=int, metavar="N", help="context; default: the model's, at most 8192")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16; default: as the checkpoint")
    parser.add_argument("--fp16", action="store_true", help="compute in float16")


def mindspeed_llm_arguments(options):
    """Arguments of Job (dict) of `add_mindspeed_llm_flags` and the flags of conversations, which must fit together.

    Raises:
        JobError: flags that contradict each other, a parallel size below 1.
    """
    if options.bf16 and options.fp16:
        raise JobError("--bf16 and --fp16 are both given: leave one of them out.")
    if options.hf_chat_template and options.prompt_type:
        raise JobError(f"--hf-chat-template and --prompt-type {options.prompt_type} are two templates: leave one of them out.")
    if options.prompt_type_path and options.prompt_type in (None, FROM_TOKENIZER):
        raise JobError("--prompt-type-path needs --prompt-type, the name of a template in that file.")
    return model_arguments(options) | {
        "checkpoint": options.load,
        "adapter": options.adapter,
        "iteration": options.ckpt_step,
        "dtype": "bf16" if options.bf16 else "fp16" if options.fp16 else None,
    }


def add_adapter_flag(parser):
    """Add the flag of adapters on top of the checkpoint."""
    text = "adapters on top of the checkpoint: folder of a run with adapters, or of PEFT"
    parser.add_argument("--adapter", "--lora", "--lora-load", dest="adapter", metavar="FOLDER", help=text)


def add_conversation_flags(parser, history_turns=None):
    """Add the flags of chats and templates."""
    kept = "as many as fit" if history_turns is None else history_turns
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--history-turns", type=not_negative, default=history_turns, metavar="N", help=f"earlier turns that are kept ({kept})"
    )
    parser.add_argument("--enable-thinking", choices=("true", "false"), help="handed to the chat template, which may heed it")
    parser.add_argument("--prompt-type", metavar="NAME", help="template of templates.json, or chat_template: the folder's own")
    parser.add_argument("--prompt-type-path", metavar="FILE", help="a templates.json in place of the package's")
    parser.add_argument("--tokenizer-name-or-path", metavar="FOLDER", help="a tokenizer in place of the checkpoint's")


def not_negative(text):
    """Integer >= 0 of a flag's text."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected an integer >= 0")
    return value


def positive(text):
    """Integer > 0 of a flag's text."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected an integer > 0")
    return value


def typed_params(options):
    """Sampling parameters that were typed (dict)."""
    names = SamplingParams.__dataclass_fields__
    typed = {name: value for name, value in vars(options).items() if name in names and value is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in typed.items()}


def flag_of(name):
    """Flag of a parameter."""
    return {"stop_token_ids": "--stop-token-id"}.get(name, "--" + name.replace("_", "-"))


def sampling_params(**values):
    """SamplingParams; an error names the flag.

    Raises:
        JobError: a value out of its range.
    """
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise JobError(f"{flag_of(error.parameter)} {error.rest}") from error


def prompts_of(options):
    """Prompts (list[str]) of --prompt and --prompt-file.

    Raises:
        JobError: an empty prompt, a file that cannot be read or has no prompt.
    """
    prompts = list(options.prompt)
    if options.prompt_file is not None:
        try:
            with open(options.prompt_file, encoding="utf-8") as file:
                lines = file.read().splitlines()
        except OSError as error:
            raise JobError(f"--prompt-file is {options.prompt_file}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise JobError(f"--prompt-file is {options.prompt_file}, which is no UTF-8 text: {error}.") from error
        if not any(lines):
            raise JobError(f"--prompt-file is {options.prompt_file}, which has no prompt: expected one in each line.")
        prompts += [line for line in lines if line]
    if "" in prompts:
        raise JobError("--prompt is empty: expected some text.")
    return prompts


def model_arguments(options):
    """Arguments of Job (dict) of the flags of the model, its layout and its conversations.

    Raises:
        JobError: a parallel size below 1.
    """
    for name in SIZES:
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise JobError(f"{flag_of(name)} is {getattr(options, name)}: expected an integer >= 1.")
    return {
        "tokenizer_path": options.tokenizer_name_or_path,
        "prompt_type": options.prompt_type,
        "prompt_type_path": options.prompt_type_path,
        "enable_thinking": None if options.enable_thinking is None else options.enable_thinking == "true",
        "system": options.system,
        "history_turns": options.history_turns,
        **{name: getattr(options, name) for name in SIZES},
    }
