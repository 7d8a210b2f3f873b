"""Convert a checkpoint between Megatron, Hugging Face and our format: `python convert_ckpt.py --help`, docs/conversion.md."""

import sys


def run():
    """Exit status; Ctrl-C ends it without a traceback while it starts, too."""
    try:
        from mindspeed_ms.tools.converter.__main__ import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("convert_ckpt.py: interrupted. Nothing was written.\n")
        return 130


if __name__ == "__main__":
    sys.exit(run())
