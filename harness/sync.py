"""Write what the run folders hold into MLflow:  python -m harness.sync [EXPERIMENT] [--follow] [--tracking-uri URI]

Safe to call at any time and as often as one likes. With --follow it goes on until no run works or waits; a queue starts it so,
at the lowest priority. Look at the result with ``mlflow ui --backend-store-uri sqlite:///runs/mlflow.db``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from harness.processes import own_environment
from harness.redaction import redact
from harness.run_folder import Busy, hold, scale_folders
from harness.run_status import at_work, read_statuses

FOLLOW_S = 5.0
"""Seconds between two looks."""
ENDING_S, POLL_S = 30.0, 0.2
"""How long jobs may take to end after their queue, and how often that is looked at."""
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "GIT_PYTHON_REFRESH": "quiet", "OMP_NUM_THREADS": "1"}


def default_uri(runs: Path) -> str:
    """MLFLOW_TRACKING_URI where it is set, else a SQLite file beside the runs."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{runs.resolve()}/mlflow.db"


def ensure_store(runs: Path, uri: str) -> None:
    """Create a SQLite store where there is none, by one process alone: two would race in its migrations."""
    if not uri.startswith("sqlite:///") or Path(uri.removeprefix("sqlite:///")).exists():
        return
    path = Path(uri.removeprefix("sqlite:///"))
    draft = path.with_name(f".{path.name}")
    with hold(path.parent / ".mlflow.lock", wait=True):
        if path.exists():
            return
        draft.unlink(missing_ok=True)  # of a creation that was interrupted
        command = [sys.executable, "-m", "harness.sync", "--create"]
        command += ["--tracking-uri", f"sqlite:///{draft}"]
        subprocess.run(command, check=True, env=_environment(), capture_output=True)
        if not path.exists():  # `mlflow ui` may have been opened meanwhile
            draft.rename(path)


def start_follower(folder: Path, uri: str) -> subprocess.Popen:
    """Follow one ``runs/<experiment>/<scale>`` in a process of the lowest priority.

    It makes its last pass and ends when its standard input is closed, by ``end_follower`` or by the end of this process.
    """
    experiment, scale, runs = folder.parent.name, folder.name, folder.parents[1].resolve()
    arguments = [experiment, "--scale", scale, "--runs", str(runs), "--tracking-uri", uri]
    with open(folder / "sync.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "harness.sync", *arguments, "--follow", "--until-eof"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
            preexec_fn=lambda: os.nice(19),
        )


def end_follower(follower: subprocess.Popen) -> int:
    """Let it make its last pass, wait for it, return its exit code."""
    follower.stdin.close()
    return follower.wait()


def wait_for_jobs(folder: Path) -> None:
    """Until no job of this machine works, at most ENDING_S: where a queue was killed outright its jobs are ending now, and a
    last look before their end would leave them RUNNING in MLflow for ever. Slurm's jobs go on and are not waited for.
    """
    deadline = time.monotonic() + ENDING_S
    while time.monotonic() < deadline and any(
        status.state == "RUNNING" and status.job is None for status in read_statuses(folder)
    ):
        time.sleep(POLL_S)


def _environment() -> dict[str, str]:
    return {**own_environment(), **QUIET}


def main(
    experiment: Annotated[str | None, typer.Argument(help="name; all where left out")] = None,
    scale: Annotated[str | None, typer.Option(help="only this scale")] = None,
    runs: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    tracking_uri: Annotated[
        str | None, typer.Option(help="MLflow store; default: mlflow.db beside the runs")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="go on while runs work or wait")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for machines, on stdout")] = False,
    until_eof: Annotated[bool, typer.Option("--until-eof", hidden=True)] = False,
    create: Annotated[bool, typer.Option("--create", hidden=True)] = False,
) -> None:
    """Bring MLflow up to date with the run folders, which stay the truth: it may be deleted and made again.

    Exit codes: 0 written; 2 there is no such experiment.
    """
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    from harness.tracking import Tracker, create_store  # MLflow takes seconds to import

    uri = tracking_uri or default_uri(runs)
    if create:
        create_store(uri)
        return
    stop = threading.Event()
    if until_eof:
        threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    ensure_store(runs, uri)
    try:
        folders = scale_folders(runs, experiment, scale)
    except FileNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    with ExitStack() as held:
        trackers = {}
        for folder in folders:
            try:
                held.enter_context(hold(folder / "sync.lock"))
                trackers[folder] = Tracker(folder, uri)
            except Busy as error:
                typer.echo(f"{folder}: another sync is at work: {error}", err=as_json)
        written = {folder: tracker.sync() for folder, tracker in trackers.items()}
        while follow and (until_eof or any(map(at_work, trackers))) and not stop.wait(FOLLOW_S):
            for folder, tracker in trackers.items():
                written[folder] += tracker.sync()
        for folder, tracker in trackers.items():
            if until_eof:
                wait_for_jobs(folder)
            written[folder] += tracker.sync()
    counts = {f"{folder.parent.name}/{folder.name}": count for folder, count in written.items()}
    if as_json:
        print(json.dumps({"store": redact(uri), "new_records": counts}))
    for where, count in counts.items() if not as_json else ():
        typer.echo(f"{where}: {count} new records, store {redact(uri)}")


if __name__ == "__main__":
    typer.run(main)
