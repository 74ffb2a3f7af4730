"""Stop runs:  python -m harness.cancel [FILTER] [--experiment NAME] [--scale S] [--runs DIR] [--json]

Without FILTER everything stops: queues first, then what still works. With it, the experiment of that name, or the runs whose
name contains it; the queue goes on with the others. Nothing is deleted: a cancelled run is KILLED, and the next submit goes on
with it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.queue import withdraw
from harness.run_folder import (
    RunFolder,
    holder,
    is_held,
    process_started,
    read_json,
    run_folders,
    scale_folders,
)
from harness.run_status import is_asked_for, queue_lock
from harness.scheduler import SlurmError
from harness.slurm import cancel_jobs

WAIT_S = 30.0
"""How long a job may take to end everything below it."""
POLL_S = 0.1


class CannotStop(RuntimeError):
    """A process that cannot be signalled from here, or that does not end; the message says what to do."""


def stop_holder(lock: Path) -> bool:
    """End the process that holds ``lock`` and wait until the lock is free. False where nobody held it.

    What a lock says may be of its previous holder, whose number another process may have by now: only the very process that
    wrote it is signalled.
    """
    deadline = time.monotonic() + WAIT_S
    signalled: int | None = None
    while is_held(lock):
        about = holder(lock)
        if about.get("host", socket.gethostname()) != socket.gethostname():
            raise CannotStop(
                f"{lock.parent.name} is worked by process {about['pid']} on {about['host']}; cancel it there"
            )
        if signalled is None and _wrote_it(about):
            os.kill(about["pid"], signal.SIGTERM)
            signalled = about["pid"]
        if time.monotonic() > deadline:
            raise CannotStop(
                f"process {signalled} of {lock.parent.name} does not end; see its log"
                if signalled is not None
                else f"{lock} is held by a process that it does not name; `fuser {lock}` finds it"
            )
        time.sleep(POLL_S)
    return signalled is not None


def _wrote_it(about: dict[str, Any]) -> bool:
    """True where the process that a lock names is still the one that wrote the name there."""
    started = about.get("process_started")
    return started is not None and process_started(about["pid"]) == started


def cancel(scale_folder: Path, pattern: str | None) -> tuple[list[str], list[str]]:
    """(names of runs that were stopped, names that were waiting and now are not)."""
    queue = scale_folder / "queue.json"
    folders = [f for f in run_folders(scale_folder) if pattern is None or pattern in f.name]
    working = [folder for folder in folders if folder.is_working()]
    waiting = [folder.name for folder in folders if _waits(queue, folder)]
    withdraw(scale_folder, None if pattern is None else [folder.name for folder in folders])
    if pattern is None:
        stop_holder(queue_lock(scale_folder))
    on_slurm = cancel_jobs(scale_folder, [folder.name for folder in folders])
    for folder in working:
        if folder.name not in on_slurm:
            stop_holder(folder.lock)
    stopped = dict.fromkeys([*(folder.name for folder in working), *on_slurm])
    return list(stopped), waiting


def _waits(queue: Path, folder: RunFolder) -> bool:
    asked = read_json(queue) or {"work": {}}
    return not folder.is_working() and is_asked_for(folder, asked["work"])


def main(
    pattern: Annotated[
        str | None, typer.Argument(metavar="FILTER", help="an experiment, or a part of runs' names")
    ] = None,
    experiment: Annotated[str | None, typer.Option(help="only of this experiment")] = None,
    scale: Annotated[str | None, typer.Option(help="only of this scale")] = None,
    runs: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="for machines: one object on stdout")
    ] = False,
) -> None:
    """Stop runs, with every process below them.

    Without FILTER everything; with the name of an experiment all of it; else
    the runs whose name contains FILTER. Logs and records stay, and the next
    submit goes on with them.

    Exit codes: 0 stopped, or nothing was at work; 1 something could not be
    stopped, and the message says what to do; 2 there is no such run.
    """
    told: dict[str, dict[str, list[str]]] = {}
    try:
        for folder, within in chosen(scale_folders(runs, experiment, scale), pattern):
            stopped, dropped = cancel(folder, within)
            name = f"{folder.parent.name}/{folder.name}"
            told[name] = {"stopped": stopped, "waits_no_longer": dropped}
            if not as_json:
                _tell(name, stopped, dropped)
    except FileNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (CannotStop, SlurmError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    finally:
        if as_json:
            print(json.dumps(told))


def chosen(folders: list[Path], pattern: str | None) -> list[tuple[Path, str | None]]:
    """(folder, filter on its runs). Raises FileNotFoundError where ``pattern`` names neither an experiment nor a run."""
    if pattern is None:
        return [(folder, None) for folder in folders]
    whole = [f for f in folders if pattern in (f.parent.name, f"{f.parent.name}/{f.name}")]
    if whole:
        return [(folder, None) for folder in whole]
    found = [f for f in folders if any(pattern in run.name for run in run_folders(f))]
    if not found:
        there = ", ".join(f"{folder.parent.name}/{folder.name}" for folder in folders)
        raise FileNotFoundError(
            f"{pattern}: no experiment and no part of a run's name; there is {there}"
        )
    return [(folder, pattern) for folder in found]


def _tell(where: str, stopped: list[str], dropped: list[str]) -> None:
    for name in stopped:
        typer.echo(f"{name}: stopped")
    for name in dropped:
        typer.echo(f"{name}: waits no longer")
    if not stopped and not dropped:
        typer.echo(f"{where}: nothing to stop")


if __name__ == "__main__":
    typer.run(main)
