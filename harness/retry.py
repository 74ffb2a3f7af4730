"""Go on with runs that ended for reasons of infrastructure:  python -m harness.retry [FILTER] [--experiment NAME] [--force]

Same identity, same folder, next attempt; what was saved is not done again. A run that is done stays done, and an outcome stays
an outcome: DIVERGED, out of memory, a hang or an error of the program are refused, since trying until a run looks better is
choosing results. With --force they go on too, and run.json says so for the report (``forced``).
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cancel import chosen
from harness.causes import cause
from harness.queue import ask, start_detached, take_over
from harness.requeue import profile
from harness.run_folder import RunFolder, hold, is_held, read_json, scale_folders
from harness.run_status import RunStatus, queue_lock, read_statuses
from harness.sbatch import Task
from harness.scheduler import SlurmError, forget
from harness.slurm import hopeless, job_ids, live, submit_arrays
from harness.sync import default_uri


@dataclass
class Choice:
    """What a retry does with the runs of one folder; each list holds (run, why)."""

    again: list[str] = field(default_factory=list)
    forced: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


def choose(statuses: Sequence[RunStatus], pattern: str | None, force: bool) -> Choice:
    """Sort the runs that are not done and not at work into those that go on and those that are refused."""
    choice = Choice()
    for status in statuses:
        if pattern is not None and pattern not in status.run:
            continue
        if status.state in ("DONE", "RUNNING", "WAITING", "PLANNED"):
            continue
        kind = cause(status.state).kind
        if status.state == "UNKNOWN":
            choice.refused.append(
                (status.run, f"nobody knows whether it still works: {status.why}")
            )
        elif kind in ("interrupted", "accident"):
            choice.again.append(status.run)
        elif force:
            choice.forced.append(status.run)
        else:
            why = f"{status.state} is an outcome: {status.why}"
            choice.refused.append((status.run, why))
    return choice


def mark(folder: RunFolder, status: RunStatus) -> None:
    """Write into run.json that a person had the outcome of this attempt tried again."""
    entry = {"time": time.time(), "state": status.state, "why": status.why}
    entry["attempt"] = status.attempt
    folder.update_run(forced=[*_forced_before(folder, status), entry])


def _forced_before(folder: RunFolder, status: RunStatus) -> list[dict[str, Any]]:
    return [e for e in folder.run.get("forced", []) if e["attempt"] != status.attempt]


@contextmanager
def marked(scale_folder: Path, outcomes: Sequence[RunStatus]) -> Iterator[None]:
    """Mark ``outcomes``, which the block sends: before it, so that none goes on unmarked whenever this process ends.

    The mark is taken back from those that have no new job where Slurm refuses or is silent: one that arrived in silence has
    nothing to do until another submit or retry finds it.
    """
    before = job_ids(scale_folder)
    for status in outcomes:
        mark(RunFolder(scale_folder / status.run), status)
    try:
        yield
    except SlurmError:
        now = job_ids(scale_folder)
        for status in outcomes:
            if now.get(status.run) == before.get(status.run):
                folder = RunFolder(scale_folder / status.run)
                folder.update_run(forced=_forced_before(folder, status))
        raise


def restart(
    scale_folder: Path, names: Sequence[str], uri: str, outcomes: Sequence[RunStatus] = ()
) -> dict[str, str]:
    """Ask for the runs again, in the order of the experiment; run -> where it went. Raises SlurmError.

    ``outcomes``: how those of them stand that only go on by force; they are marked where they do.

    For the holder of ``submit.lock``, who chose them under it: two at once would try an outcome again, unmarked.
    """
    order = (read_json(scale_folder / "queue.json") or {"order": []})["order"]
    names = sorted(names, key=lambda name: order.index(name) if name in order else len(order))
    if shutil.which("sbatch") and (scale_folder / "slurm.json").exists():
        alive = live(scale_folder, fresh=True)
        tasks = [Task.of(RunFolder(scale_folder / n)) for n in names if n not in alive]
        lacking = hopeless(scale_folder, tasks, alive)
        sent = [task for task in tasks if task.name not in lacking]
        taken = {task.name for task in sent}
        with marked(scale_folder, [status for status in outcomes if status.run in taken]):
            ids = submit_arrays(scale_folder, sent, profile(scale_folder))
        went = {task.name: f"job {ids[task.name]}" for task in sent}
        return went | {n: f"not sent: it needs {need}" for n, need in lacking.items()}
    with marked(scale_folder, outcomes):
        take_over(scale_folder, names)
        ask(scale_folder, order, names)
    if not is_held(queue_lock(scale_folder)):
        start_detached(scale_folder, uri)
    return dict.fromkeys(names, "with the queue of this machine")


def main(
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="[FILTER]", help="an experiment, or runs whose name contains this"),
    ] = None,
    experiment: Annotated[str | None, typer.Option(help="only of this experiment")] = None,
    scale: Annotated[str | None, typer.Option(help="only of this scale")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="outcomes too; run.json and the report say so")
    ] = False,
    runs: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="for machines, on stdout")] = False,
) -> None:
    """Go on with runs that infrastructure ended; refuse to try outcomes again.

    Exit codes: 0 what could go on does; 2 there is no such experiment, or Slurm refuses; 3 only outcomes were left.
    """
    told: dict[str, dict[str, str]] = {}
    refusals = 0
    try:
        for folder, within in chosen(scale_folders(runs, experiment, scale), pattern):
            with hold(folder / "submit.lock", wait=True):
                forget()
                statuses = {status.run: status for status in read_statuses(folder)}
                choice = choose(list(statuses.values()), within, force)
                names = [*choice.again, *choice.forced]
                outcomes = [statuses[name] for name in choice.forced]
                went = restart(folder, names, default_uri(runs), outcomes) if names else {}
            refusals += len(choice.refused)
            for name, how in went.items():
                does = "waits" if how.startswith("not sent") else "goes on"
                told[name] = {"does": does, "how": how}
            told |= {name: {"does": "refused", "how": why} for name, why in choice.refused}
    except (FileNotFoundError, SlurmError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    if as_json:
        print(json.dumps(told))
    for name, entry in told.items() if not as_json else ():
        typer.echo(f"{name}: {entry['does']}: {entry['how']}")
    if not told and not as_json:
        typer.echo("Nothing to retry: every run is done, works, or was never started.")
    if refusals and not as_json and not force:
        typer.echo("--force tries outcomes again, and marks the runs for the report.")
    raise typer.Exit(3 if refusals and len(told) == refusals else 0)


if __name__ == "__main__":
    typer.run(main)
