"""Arguments of `preprocess_data.py`: MindSpeed-LLM's flags, and a few of our own. Opens no file."""

import argparse
import json
import os

from mindspeed_ms.core.datasets.tokenizer import TokenizerSettings
from mindspeed_ms.spelling import did_you_mean
from mindspeed_ms.tasks.preprocess.errors import PreprocessError
from mindspeed_ms.tasks.preprocess.map_keys import check_map_keys
from mindspeed_ms.tasks.preprocess.registry import PRETRAIN, check_handler
from mindspeed_ms.tasks.preprocess.settings import TRUNCATIONS, Run, Settings

# upstream's flags that change nothing here, and why
_IGNORED = {
    "--streaming": "input is always streamed",
    "--dataset-impl": "there is one format",
    "--log-interval": "a progress bar is shown",
    "--trust-remote-code": "no code of a tokenizer's folder is ever run",
    "--seed": "nothing is drawn: records keep their order",
}
_IGNORED_WITHOUT_VALUE = ("--streaming", "--trust-remote-code")
# upstream's flags that cannot be honoured: the reason, and the way out
_REFUSED = {
    "--split-sentences": "sentences are cut for BERT only; a GPT corpus has one sequence per document. Leave it out.",
    "--keep-newlines": "it belongs to --split-sentences, which is for BERT only. Leave it out.",
    "--hf-datasets-params": "files are read directly. Give them with --input.",
    "--script-data-dir": "loading scripts are not run. Give data files with --input.",
    "--datasets": "data sets are not looked up by name. Give files with --input.",
    "--dataset-dir": "data sets are not looked up by name. Give files with --input and columns with --map-keys.",
    "--dataset-additional-keys": "no handler here stores further columns. Leave it out.",
    "--interleave-probs": "corpora are mixed when they are trained on: --data-path WEIGHT PREFIX WEIGHT PREFIX.",
    "--mix-strategy": "corpora are mixed when they are trained on: --data-path WEIGHT PREFIX WEIGHT PREFIX.",
    "--pad-to-multiple-of": "padding inside a corpus would be trained on as text; training pads batches. Leave it out.",
}
_MAP_KEYS_EXAMPLE = '{"prompt":"question","response":"answer"}'


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise PreprocessError(message)


def argument_parser():
    """Build the argparse.ArgumentParser; it raises PreprocessError instead of ending the process."""
    parser = _Parser(prog="preprocess_data.py", allow_abbrev=False, description="Turn text into token files for training.")
    _add_input(parser.add_argument_group("input"))
    _add_conversations(parser.add_argument_group("instruction data"))
    _add_tokenizer(parser.add_argument_group("tokenizer"))
    _add_output(parser.add_argument_group("output"))
    for flag in _IGNORED:
        how = {"action": "store_true"} if flag in _IGNORED_WITHOUT_VALUE else {}
        parser.add_argument(flag, **how, default=None, help=argparse.SUPPRESS)
    return parser


def _add_input(group):
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders or patterns: jsonl json parquet arrow csv txt; text formats also .gz .zst .bz2",
    )
    group.add_argument("--handler-name", default="", metavar="NAME", help=f"what the records are (default {PRETRAIN})")
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="columns of a pretraining corpus")
    group.add_argument(
        "--map-keys", metavar="JSON", help=f"names of the columns, as '{_MAP_KEYS_EXAMPLE}'; \"\" switches a column off"
    )
    group.add_argument("--max-samples", type=_positive, metavar="N", help="read only the first N records")
    group.add_argument(
        "--on-invalid",
        choices=("error", "skip"),
        default="error",
        help="a record that is broken or lacks a key: end the run (default), or leave it out and count it",
    )
    group.add_argument(
        "--merge-group-keys",
        nargs="+",
        metavar="KEY",
        help="tokenize nothing: join the .bin/.idx pairs in the folder --input whose names contain KEY",
    )


def _add_conversations(group):
    group.add_argument("--prompt-type", metavar="TEMPLATE", help="chat template, see configs/finetune/templates.json")
    group.add_argument("--prompt-type-path", metavar="FILE", help="file of the templates (default: the package's)")
    group.add_argument(
        "--enable-thinking",
        nargs="?",
        const="true",
        choices=("true", "false", "none"),
        default="none",
        help="thinking in templates that know it",
    )
    group.add_argument("--seq-length", type=_positive, metavar="N", help="longest sample in tokens")
    group.add_argument("--pack", action="store_true", help="fill sequences of --seq-length tokens with several samples")
    group.add_argument("--neat-pack", action="store_true", help="with --pack: samples in a sequence do not see each other")
    group.add_argument(
        "--truncation",
        choices=TRUNCATIONS,
        default="keep-last",
        help="longer conversations: cut from the front so that the last answer stays (default), cut turn by "
        "turn from the oldest as upstream does, or leave them out",
    )
    group.add_argument("--placeholder-token", default="ки", help="process reward: stands where a step ends")
    group.add_argument("--reward-tokens", nargs="*", default=[], help="process reward: the labels, one token each")


def _add_tokenizer(group):
    group.add_argument(
        "--tokenizer-type",
        metavar="TYPE",
        help="PretrainedFromHF, GPTSentencePieceTokenizer, Llama2Tokenizer, GPT2BPETokenizer, NullTokenizer, ...",
    )
    group.add_argument("--tokenizer-name-or-path", metavar="FOLDER", help="folder of a Hugging Face tokenizer")
    group.add_argument("--tokenizer-model", metavar="FILE", help="sentencepiece model, or tokenizer.json")
    group.add_argument("--tokenizer-not-use-fast", action="store_true", help="prefer a sentencepiece model to tokenizer.json")
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of a GPT2 tokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of a GPT2 tokenizer")
    group.add_argument("--vocab-size", type=_positive, metavar="N", help="of the NullTokenizer")
    group.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    group.add_argument(
        "--make-vocab-size-divisible-by",
        type=_positive,
        default=128,
        metavar="N",
        help="only for the padded vocabulary size that is reported",
    )
    group.add_argument(
        "--pad-vocab-size-to", type=_positive, metavar="N", help="rows of the model's embedding: ids must be below"
    )


def _add_output(group):
    group.add_argument("--output-prefix", required=True, metavar="PREFIX", help="beginning of the output files' names")
    group.add_argument("--workers", type=_positive, default=1, metavar="N", help="processes that tokenize")
    group.add_argument(
        "--n-subs",
        type=_positive,
        default=1,
        metavar="N",
        help="upstream's other name for parallel parts: the larger of the two counts; the output is the same",
    )
    group.add_argument("--cache-dir", metavar="FOLDER", help="folder of unfinished files (default: beside the output)")
    group.add_argument("--overwrite-cache", action="store_true", help="start over instead of continuing an unfinished run")
    group.add_argument("--overwrite-output", action="store_true", help="replace output files that exist")


def _positive(text):
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return value


def parse(words):
    """Parse a command line: (Settings, Run).

    Args:
        words (list[str]): the command line without the program's name.

    Returns:
        (argparse.Namespace, Settings, Run, list[str]): the last are notes for the user.

    Raises:
        PreprocessError: an unknown flag, handler or key, or values that do not go together.
    """
    parser = argument_parser()
    words = [_with_hyphens(word) for word in words]
    _refuse(words)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        raise PreprocessError(
            f"{unknown[0]} is not an option of preprocess_data.py.{did_you_mean(unknown[0], parser._option_string_actions)}"
        )
    notes = [f"{flag} is ignored: {reason}" for flag, reason in _IGNORED.items() if getattr(args, _attribute(flag)) is not None]
    _check_prefix(args.output_prefix)
    settings = _settings(args)
    run = Run(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        workers=max(args.workers, args.n_subs),
        max_samples=args.max_samples,
        model_vocab_size=args.pad_vocab_size_to,
        restart=args.overwrite_cache,
        overwrite=args.overwrite_output,
        cache_dir=args.cache_dir and os.path.expanduser(args.cache_dir),
    )
    return args, settings, run, notes


def _settings(args):
    handler = args.handler_name or PRETRAIN
    check_handler(handler, args)
    return Settings(
        handler_name=handler,
        tokenizer=_tokenizer_settings(args),
        json_keys=tuple(dict.fromkeys(args.json_keys)),
        map_keys=check_map_keys(_json_object(args.map_keys), handler) if args.map_keys else {},
        prompt_type=args.prompt_type,
        prompt_type_path=args.prompt_type_path,
        enable_thinking={"true": True, "false": False, "none": None}[args.enable_thinking],
        append_eod=args.append_eod,
        seq_length=args.seq_length,
        pack=args.pack,
        neat_pack=args.neat_pack,
        truncation=args.truncation,
        placeholder_token=args.placeholder_token,
        reward_tokens=tuple(args.reward_tokens),
        skip_invalid=args.on_invalid == "skip",
    )


def _tokenizer_settings(args):
    settings = TokenizerSettings(
        args.tokenizer_type,
        args.tokenizer_name_or_path,
        args.tokenizer_model,
        args.vocab_file,
        args.merge_file,
        args.vocab_size,
        use_fast=not args.tokenizer_not_use_fast,
    )
    if not settings.is_given and not args.merge_group_keys:
        raise PreprocessError(
            "no tokenizer is given: name the folder of one with --tokenizer-name-or-path, or see --tokenizer-type."
        )
    return settings


def _json_object(text):
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise PreprocessError(
            f"--map-keys: broken JSON, {error.msg} at character {error.pos}: {text!r}. Expected an object, "
            f"in quotes for the shell: '{_MAP_KEYS_EXAMPLE}'."
        ) from error
    if not isinstance(value, dict):
        raise PreprocessError(f"--map-keys: expected a JSON object, found {text!r}.")
    return value


def _with_hyphens(word):
    """Words with hyphens: `--cache_dir` becomes `--cache-dir`, since many scripts and guides write underscores."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _attribute(flag):
    return flag[2:].replace("-", "_")


def _refuse(words):
    for word in words:
        name = word.partition("=")[0]
        if name in _REFUSED:
            raise PreprocessError(f"{name} is not supported: {_REFUSED[name]}")


def _check_prefix(prefix):
    if not os.path.basename(prefix) or os.path.isdir(prefix):
        raise PreprocessError(
            f"--output-prefix {prefix} is a folder: give the beginning of the output files' names, as "
            f"{os.path.join(prefix, 'corpus')}."
        )
