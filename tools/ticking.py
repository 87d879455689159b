"""Run a command, and say every ten seconds that it is still at work.

    python3 tools/ticking.py "installing .venv" pip install ...

For long commands that say nothing by themselves, in a log as on a terminal; ``make setup`` installs environments so.
The command ends with this process, if that is told to end.
"""

import signal
import subprocess
import sys
import time

EVERY = 10


def main(words: str, command: list[str]) -> int:
    """Return the command's exit code, as a shell counts it."""
    began, process = time.monotonic(), subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        try:
            code = process.wait(EVERY)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            sys.stdout.write(f"{words}: {time.monotonic() - began:.0f} s\n")
            sys.stdout.flush()
        except KeyboardInterrupt:  # the command has got it, too
            return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
