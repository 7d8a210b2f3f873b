"""Show a growing log file until a process has ended: `python -m mindspeed_ms.tools.follow_log FILE --process PID`.

Of the lines of single steps (`Iteration: 10/300`) the first, the last and one every few seconds are shown; the file has all.
On a terminal a progress bar is below them.
"""

import os
import re
import sys
import time

from mindspeed_ms.spelling import SuggestingParser

_ITERATION = re.compile(r"\bLoss: ([-+.\w]+).*\bIteration: (\d+)/(\d+)")
_INTERVAL_SECONDS = 0.1


def is_running(process):
    """Whether a process exists and has not ended; a zombie has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def lines_of(path, process):
    """Yield the lines of a file as they appear, until `process` has ended and all are read.

    Args:
        path (str): the file; it need not exist yet.
        process (int): id of the process that lets the file grow.
    """
    while not os.path.exists(path):
        if not is_running(process):
            return
        time.sleep(_INTERVAL_SECONDS)
    rest = ""
    with open(path, encoding="utf-8", errors="replace") as file:
        while True:
            ended = not is_running(process)  # asked before reading, so that its last lines are read
            text = file.read()
            *lines, rest = (rest + text).split("\n")
            yield from lines
            if ended:
                break
            if not text:
                time.sleep(_INTERVAL_SECONDS)
    if rest:
        yield rest


class Screen:
    """Screen output: prints lines, on a terminal with a progress bar of the training below them.

    Args:
        is_terminal (bool): show the bar.
        interval (float): seconds between two lines of steps; 0 shows all.
    """

    def __init__(self, is_terminal, interval=5.0):
        self.is_terminal = is_terminal
        self.interval = interval
        self.bar = None
        self._last = float("-inf")

    def show(self, line):
        """Print a line and move the bar; lines of steps are left out for `interval` seconds after one."""
        match = _ITERATION.search(line)
        if match and self.is_terminal:
            self._advance(match[1], int(match[2]), int(match[3]))
        now = time.monotonic()
        if match and match[2] != match[3]:
            if now - self._last < self.interval:
                return
            self._last = now
        if self.bar is None:
            print(line, flush=True)
        else:
            self.bar.write(line)

    def _advance(self, loss, iteration, total):
        if self.bar is None:
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=iteration, unit="step", dynamic_ncols=True)
        self.bar.set_postfix_str(f"loss {float(loss):.3f}", refresh=False)
        self.bar.update(iteration - self.bar.n)
        if iteration == total:
            self.close()

    def close(self):
        """Close the bar as it is."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def main(words=None):
    """Entry point of the command line."""
    parser = SuggestingParser(prog="python -m mindspeed_ms.tools.follow_log", description=__doc__.split("\n")[0])
    parser.add_argument("file", help="the log; it may appear later")
    parser.add_argument("--process", type=int, required=True, metavar="PID", help="end when this process has ended")
    parser.add_argument("--interval", type=float, default=5.0, metavar="SECONDS", help="between two lines of steps; 0: all")
    args = parser.parse_args(words)
    screen = Screen(sys.stdout.isatty(), args.interval)
    for line in lines_of(args.file, args.process):
        screen.show(line)
    screen.close()


if __name__ == "__main__":
    main()
