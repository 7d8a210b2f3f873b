#!/usr/bin/env python
"""Stands for `bash` on the PATH of documented commands: a training that a page starts is interrupted after some steps.

`bash gpt/pretrain_gpt.sh ...` runs as it was typed; when rank 0 has logged step 3 it gets the Ctrl-C of a user, who then
finds a checkpoint and exit code 0. Everything else is handed to the real bash.
"""

import os
import re
import signal
import subprocess
import sys
import time

BASH = "/bin/bash"
STEPS = 3
SECONDS = 240


def _steps(log):
    try:
        with open(log, encoding="utf-8", errors="replace") as file:
            return len(re.findall(r"Step: \d+, Loss: ", file.read()))
    except FileNotFoundError:
        return 0


def main():
    """Run the command; the exit code is the command's, or 124 if it neither ended nor trained in time."""
    if len(sys.argv) < 2 or not sys.argv[1].endswith("pretrain_gpt.sh"):
        os.execv(BASH, [BASH, *sys.argv[1:]])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with SIGINT ignored
    log = os.path.join("msrun_log", "worker_0.log")
    if os.path.exists(log):
        os.remove(log)
    job = subprocess.Popen([BASH, *sys.argv[1:]], start_new_session=True)
    end, interrupted = time.monotonic() + SECONDS, False
    while job.poll() is None:
        if time.monotonic() > end:
            os.killpg(job.pid, signal.SIGKILL)
            return 124
        if not interrupted and _steps(log) >= STEPS:
            os.kill(job.pid, signal.SIGINT)
            interrupted = True
        time.sleep(0.2)
    if job.returncode == 0 and not _steps(log):
        sys.stderr.write("The command ended with code 0 and trained nothing.\n")
        return 125
    return job.returncode


if __name__ == "__main__":
    sys.exit(main())
