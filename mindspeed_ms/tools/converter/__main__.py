"""The command `convert_ckpt.py`, or `python -m mindspeed_ms.tools.converter`."""

import os
import signal
import sys

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.logging import setup_logging
from mindspeed_ms.tools.converter.arguments import parse
from mindspeed_ms.tools.converter.convert import convert
from mindspeed_ms.tools.converter.errors import ConversionError


def main(words=None, form=""):
    """Run the command line `words` (default: this process's).

    Args:
        form (str): "pt2ckpt" or "ckpt2pt" for the flags of upstream's converters.

    Returns:
        int: 0, 2 for an error that the user can mend, 130 if interrupted.
    """
    setup_logging()
    name = f"convert_{form or 'ckpt'}.py"
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
    try:
        lines = convert(parse(sys.argv[1:] if words is None else words, form))
    except (ConversionError, CheckpointError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f": {os.fspath(error.filename)}" if error.filename else ""
        print(f"{name}: {error.strerror or error}{where}. Nothing was written.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted. Nothing was written.", file=sys.stderr)
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    print("\n".join(lines).encode(errors="backslashreplace").decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
