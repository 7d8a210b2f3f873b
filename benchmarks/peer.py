"""The other side of a benchmark: a program in another Python, asked line by line."""

import json
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


class Peer:
    """`script` of this folder in its own process.

    Args:
        python (str): Python of an environment with the [peer] extra.
        script (str): answers a line of JSON with a line of JSON.
        arguments: of the script.
    """

    def __init__(self, python, script, *arguments):
        self.command = [python, str(HERE / script), *map(str, arguments)]
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def __call__(self, *question):
        """Ask; returns the answer.

        Raises:
            SystemExit: the process has ended.
        """
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"the peer ended with code {self.process.wait()}: run {' '.join(self.command)} by hand to see why (it needs "
                "the [peer] extra)."
            )
        return json.loads(line)

    def close(self):
        """End the process."""
        self.process.stdin.close()
        self.process.wait()
