"""What every Python process of a run does at its start: the driver, Ray's workers, vLLM's own processes.

MOLT_CODE names the copy of the code that the run was submitted with: a process that imported another one ends at once, before
it mixes two programs. MOLT_STACKS names a folder: SIGQUIT then makes a process write the stacks of all its threads there, which
works in a deadlock too, since the handler needs no interpreter.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path


def check_code() -> None:
    """Raises SystemExit where this process did not import the run's copy of the code; ``site`` swallows anything less."""
    code, here = os.environ.get("MOLT_CODE"), Path(__file__).resolve()
    if code and not here.is_relative_to(Path(code).resolve()):
        raise SystemExit(
            f"molt_core was imported from {here.parent}, and this run's code is {code}"
        )


def begin() -> None:
    """Check the code, and be ready to write stacks."""
    check_code()
    stacks = os.environ.get("MOLT_STACKS")
    if stacks:
        Path(stacks).mkdir(parents=True, exist_ok=True)
        file = open(Path(stacks) / f"{os.getpid()}.txt", "w")  # open as long as the process lives
        faulthandler.register(signal.SIGQUIT, file=file, all_threads=True)
        sys._molt_stacks = file
