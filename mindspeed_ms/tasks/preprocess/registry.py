"""Registry of handlers: names and their options; imports no handler."""

from dataclasses import dataclass

from mindspeed_ms.spelling import did_you_mean
from mindspeed_ms.tasks.preprocess.errors import PreprocessError

PRETRAIN = "GeneralPretrainHandler"


@dataclass(frozen=True)
class HandlerKind:
    """Properties of a handler that are known before it is constructed.

    Attributes:
        style (str): form of the records: "pretrain", "alpaca", "sharegpt", "openai" or "process_reward".
        task (str): kind of samples: "text", "instruction", "pairwise", "prompt" or "process_reward".
    """

    style: str
    task: str

    @property
    def has_template(self):
        """Whether records are conversations, which a template renders."""
        return self.task in ("instruction", "pairwise", "prompt")


HANDLER_KINDS = {
    PRETRAIN: HandlerKind("pretrain", "text"),
    "AlpacaStyleInstructionHandler": HandlerKind("alpaca", "instruction"),
    "SharegptStyleInstructionHandler": HandlerKind("sharegpt", "instruction"),
    "OpenAIInstructionHandler": HandlerKind("openai", "instruction"),
    "AlpacaStylePairwiseHandler": HandlerKind("alpaca", "pairwise"),
    "SharegptStylePairwiseHandler": HandlerKind("sharegpt", "pairwise"),
    "PPOAlpacaStyleInstructionHandler": HandlerKind("alpaca", "prompt"),
    "AlpacaStyleProcessRewardHandler": HandlerKind("process_reward", "process_reward"),
}
# upstream's other handlers, and what serves instead
_ELSEWHERE = {
    "AlpacaPretrainHandler": "write the text that is to be learnt into one column and use GeneralPretrainHandler",
    "SharegptPretrainHandler": "use SharegptStyleInstructionHandler with --prompt-type empty",
    "LlamaFactoryInstructionHandler": "name the files with --input and the columns with --map-keys, and use "
    "AlpacaStyleInstructionHandler or SharegptStyleInstructionHandler",
    "GeneralInstructionHandler": "use AlpacaStyleInstructionHandler with --prompt-type alpaca",
    "HunyuanInstructionHandler": "use OpenAIInstructionHandler",
    "R1AlpacaStyleInstructionHandler": "use PPOAlpacaStyleInstructionHandler, or AlpacaStyleInstructionHandler with the answer",
    "R1SharegptStyleInstructionHandler": "use SharegptStyleInstructionHandler",
}


def check_handler(name, args):
    """Check a handler's name and the options that depend on it.

    Args:
        name (str): value of `--handler-name`.
        args (argparse.Namespace): the parsed command line.

    Raises:
        PreprocessError: no such handler (the message names the nearest), or an option does not go with it.
    """
    if name not in HANDLER_KINDS:
        if name in _ELSEWHERE:
            raise PreprocessError(f"--handler-name {name} is not offered: {_ELSEWHERE[name]}.")
        raise PreprocessError(
            f"--handler-name {name}: unknown handler.{did_you_mean(name, HANDLER_KINDS)} Known: {', '.join(HANDLER_KINDS)}."
        )
    kind = HANDLER_KINDS[name]
    if kind.has_template and not args.prompt_type:
        raise PreprocessError(
            f"--handler-name {name} needs a template: add --prompt-type NAME (empty: the records' text as it "
            "is; chat_template: the one in the tokenizer's folder)."
        )
    if args.prompt_type and not kind.has_template:
        raise PreprocessError(
            f"--prompt-type {args.prompt_type} has no meaning for {name}: leave it out, or name a handler of "
            "conversations, as AlpacaStyleInstructionHandler, with --handler-name."
        )
    if args.neat_pack and not args.pack:
        raise PreprocessError("--neat-pack separates the samples of a packed sequence: add --pack.")
    if args.pack and kind.task != "instruction":
        raise PreprocessError(f"--pack is for instruction data, but {name} writes {kind.task} data: leave it out.")
    if args.pack and not args.seq_length:
        raise PreprocessError("--pack needs the length of the packed sequences: add --seq-length N.")
    if args.pack and args.seq_length < 2:
        raise PreprocessError(f"--pack with --seq-length {args.seq_length}: expected at least 2.")
