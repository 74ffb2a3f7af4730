"""Read what a run says:  python -m harness.logs RUN [-f] [--attempt N] [--slurm]

The output of the last attempt; -f follows it, over into the next attempt, until the run neither works nor waits.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from harness.run_folder import RunFolder
from harness.run_status import read_statuses
from harness.slurm import job_ids
from harness.why import find_run

POLL_S = 0.5


def follow(folder: RunFolder, name: str = "output.log") -> Iterator[bytes]:
    """What the last attempt has written and goes on writing, then each later attempt's, until the run is at rest."""
    number, offset = max(0, len(folder.attempts) - 1), 0
    while True:
        resting = not at_work(
            folder
        )  # asked before reading: what was written before the end is not missed
        attempts = folder.attempts
        if number < len(attempts):
            path = attempts[number] / name
            if path.exists():
                with open(path, "rb") as file:
                    file.seek(offset)
                    data = file.read()
                offset += len(data)
                if data:
                    yield data
            if number + 1 < len(attempts):
                number, offset = number + 1, 0
                yield f"==> attempt {attempts[number].name} <==\n".encode()
                continue
        if resting:
            return
        time.sleep(POLL_S)


def at_work(folder: RunFolder) -> bool:
    """True while the run may still write."""
    if folder.is_working():
        return True
    statuses = read_statuses(folder.path.parent, earlier=True)
    state = next(status.state for status in statuses if status.run == folder.name)
    return state in ("RUNNING", "WAITING", "UNKNOWN")


def slurm_log(folder: RunFolder) -> Path:
    """What Slurm and the job itself said of the last submission, beside the command's output. Raises FileNotFoundError."""
    job_id = job_ids(folder.path.parent).get(folder.name)
    path = folder.path.parent / "slurm" / f"{job_id}_0_log.out"
    if job_id is None or not path.exists():
        raise FileNotFoundError(f"{folder.name}: no job of Slurm has said anything of it")
    return path


def attempt_log(folder: RunFolder, attempt: int | None) -> Path:
    """What the command of that attempt, or of the last, has said. Raises FileNotFoundError that says what there is."""
    attempts = {int(path.name): path for path in folder.attempts}
    if not attempts:
        raise FileNotFoundError(f"{folder.name} has not been started: there is no log of it")
    path = attempts.get(max(attempts) if attempt is None else attempt)
    if path is None:
        there = ", ".join(map(str, attempts))
        raise FileNotFoundError(f"{folder.name} has no attempt {attempt}; there is {there}")
    if not (path / "output.log").exists():
        raise FileNotFoundError(f"{folder.name}: attempt {path.name} has said nothing")
    return path / "output.log"


def main(
    run: Annotated[str, typer.Argument(help="a run's name, or a part that only it has")],
    experiment: Annotated[str | None, typer.Option(help="only of this experiment")] = None,
    scale: Annotated[str | None, typer.Option(help="only of this scale")] = None,
    follow_: Annotated[
        bool, typer.Option("--follow", "-f", help="go on while the run does")
    ] = False,
    attempt: Annotated[int | None, typer.Option(help="of this attempt; default: the last")] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="what Slurm and the job said, not the command")
    ] = False,
    runs: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="for machines: one object with file and lines")
    ] = False,
) -> None:
    """Print a run's log, whatever bytes are in it.

    Exit codes: 0 shown; 2 there is no such run, attempt or log.
    """
    if follow_ and (slurm or as_json or attempt is not None):
        typer.echo("-f follows from attempt to attempt: no --attempt, --slurm, --json", err=True)
        raise typer.Exit(2)
    try:
        folder = find_run(runs, run, experiment, scale)
        if follow_:
            for data in follow(folder):
                sys.stdout.buffer.write(data)
                sys.stdout.flush()
            return
        path = slurm_log(folder) if slurm else attempt_log(folder, attempt)
        said = path.read_bytes()
        if as_json:
            lines = said.decode(errors="replace").splitlines()
            print(json.dumps({"run": folder.name, "file": str(path), "lines": lines}))
        else:
            sys.stdout.buffer.write(said)
    except FileNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    typer.run(main)
