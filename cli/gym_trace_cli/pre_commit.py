"""gym-trace check for the traces of some files: the hook gym-trace-check of .pre-commit-hooks.yaml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(words: list[str]) -> int:
    """Check the trace of each file; return the exit code of the first that is damaged, or 0."""
    codes = [
        subprocess.run([sys.executable, "-I", "-m", "gym_trace", "check", "--quiet", directory]).returncode
        for directory in dict.fromkeys(str(Path(word).parent) for word in words)
    ]
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
