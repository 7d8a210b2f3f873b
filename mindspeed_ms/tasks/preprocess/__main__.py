"""The command `preprocess_data.py`, or `python -m mindspeed_ms.tasks.preprocess`."""

import os
import sys

from mindspeed_ms.core.datasets.tokenizer import TokenizerError
from mindspeed_ms.core.datasets.tokenizer.chat_template import TemplateError
from mindspeed_ms.core.logging import logger, setup_logging
from mindspeed_ms.tasks.preprocess.arguments import parse
from mindspeed_ms.tasks.preprocess.errors import PreprocessError


def main(words=None):
    """Run the command line `words` (default: this process's).

    Returns:
        int: 0, 1 for an error that the user can mend, 130 if interrupted.
    """
    setup_logging()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --workers decides how many cores are used
    try:
        args, settings, run, notes = parse(sys.argv[1:] if words is None else words)
        for note in notes:
            logger.info(note)
        if args.merge_group_keys:
            from mindspeed_ms.tasks.preprocess.merging import merge_groups

            lines = merge_groups(args.input, args.merge_group_keys, run)
        else:
            from mindspeed_ms.tasks.preprocess.pipeline import preprocess

            lines = preprocess(settings, run, args.make_vocab_size_divisible_by).lines()
    except (PreprocessError, TokenizerError, TemplateError) as error:
        print(f"preprocess_data.py: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"preprocess_data.py: {error.strerror or error}: {error.filename or 'while writing the output'}. No output file "
            "was given its name; make room and repeat the command to continue.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("preprocess_data.py: interrupted. What was done is kept: repeat the command to continue.", file=sys.stderr)
        return 130
    print("\n".join(lines).encode(errors="backslashreplace").decode())  # names of files may be no UTF-8
    return 0


if __name__ == "__main__":
    sys.exit(main())
