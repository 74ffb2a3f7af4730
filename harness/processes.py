"""No process outlives its job: the few kernel calls that make this true on Linux.

A job is a *subreaper*: whatever its descendants leave behind (a daemon of Ray, an engine of vLLM) becomes its own child and not
init's, so it can be found and ended. A child may ask to be signalled when its parent dies. And every process of a run
carries the run's mark in its environment, by which leftovers of a job that was killed outright are found later.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import psutil

from harness.identity import ROOT

MARK = "MOLT_RUN"
"""Environment variable that says which run a process belongs to (``RunFolder.mark``)."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def own_environment(code: Path = ROOT) -> dict[str, str]:
    """The environment of a child that imports the harness from ``code``, wherever it starts.

    PYTHONSAFEPATH: the folder that it starts in does not come first on the import path, as it does with ``python -m``.
    """
    path = [str(code), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def become_subreaper() -> None:
    """Orphaned descendants of this process become its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signalled_when_parent_dies(number: signal.Signals, parent: int) -> None:
    """To be called in the child between fork and exec; ``parent``: the process id of the one that forked.

    A parent that died before the kernel was asked would never be reported, hence the look after it; a handler of the parent's
    would swallow the signal, hence the default before it.
    """
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_descendants(grace_s: float = 5.0) -> list[str]:
    """End every descendant of this process: SIGTERM, ``grace_s`` seconds, SIGKILL. Returns the names of those that remained.

    Repeats until none is left, since a dying process may hand over children of its own. To be called by a subreaper, with
    SIGCHLD blocked.
    """
    met: dict[int, str] = {}
    deadline = time.monotonic() + grace_s
    while True:
        reap()
        alive = psutil.Process().children(recursive=True)
        if not alive:
            return sorted(met.values())
        late = time.monotonic() >= deadline
        for process in alive:
            try:
                if process.pid not in met:
                    met[process.pid] = process.name()
                    process.terminate()
                if late:
                    process.kill()
            except psutil.NoSuchProcess:
                continue
        signal.sigtimedwait([signal.SIGCHLD], 0.05)


def dump_stacks(folder: Path, mark: str, patience_s: float = 3.0) -> list[Path]:
    """Have every process of a run that can (``molt_core/_process.py``) write the stacks of its threads; returns the files.

    A process that can has opened ``folder/<pid>.txt`` at its start. The handler is the kernel's business and not the
    interpreter's: it answers from inside a deadlock too.
    """
    alive = {process.pid for process in psutil.Process().children(recursive=True)}
    alive |= {process.pid for process in leftovers(mark)}  # in a step of Slurm's
    files = [file for file in sorted(folder.glob("*.txt")) if int(file.stem) in alive]
    files = [file for file in files if catches(int(file.stem), signal.SIGQUIT)]
    for file in files:
        os.kill(int(file.stem), signal.SIGQUIT)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and any(file.stat().st_size == 0 for file in files):
        time.sleep(0.05)
    return files


def catches(pid: int, number: signal.Signals) -> bool:
    """True where the process has a handler for the signal. One that has become another program since it had one has none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def reap() -> dict[int, int]:
    """Collect ended children without waiting: pid -> return code (negative: the signal that ended it)."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def leftovers(mark: str) -> list[psutil.Process]:
    """This user's processes that carry the run's mark, but for this process and its ancestors."""
    this = psutil.Process()
    own = {this.pid, *(parent.pid for parent in this.parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in own:
            continue
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return found


def end_leftovers(mark: str, grace_s: float = 5.0) -> list[str]:
    """End what an earlier job of this run left behind; returns the names."""
    found = leftovers(mark)
    names = []
    for process in found:
        try:
            names.append(process.name())
            process.terminate()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(found, timeout=grace_s)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=grace_s)
    return names
