"""Tell a person when a run is lost and when everything has ended:  python -m harness.notify "text"   (sends a test)

Where to is in the variable MOLT_NOTIFY, so that no address and no secret is in a file: ``mailto:me@example.org`` (by the
machine's sendmail) or the URL of a webhook, which is POSTed ``{"text": ...}``. Jobs send: one message for each run that ends
otherwise than well and does not go back into the queue, one when the last of those that were asked for has ended. A message
that cannot be sent is a line in the job's log and changes nothing else.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import urllib.request
from email.message import EmailMessage
from typing import Annotated

import typer

from harness.identity import digest
from harness.requeue import job_of
from harness.run_folder import RunFolder, read_json
from harness.run_status import is_asked_for
from harness.slurm import job_ids

VARIABLE = "MOLT_NOTIFY"
PATIENCE_S = 10.0


class CannotTell(RuntimeError):
    """The message did not go out; says why."""


def send(text: str, where: str) -> None:
    """Send ``text`` to ``where``. Raises CannotTell."""
    try:
        if where.startswith("mailto:"):
            mail = EmailMessage()
            mail["To"], mail["Subject"] = where.removeprefix("mailto:"), text.splitlines()[0]
            mail.set_content(text)
            command = ["sendmail", "-t"]
            subprocess.run(command, input=mail.as_bytes(), check=True, timeout=PATIENCE_S)
        elif where.startswith(("http://", "https://")):
            body = json.dumps({"text": text}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(where, data=body, headers=headers)
            urllib.request.urlopen(request, timeout=PATIENCE_S).close()
        else:
            raise CannotTell(f"{VARIABLE} is neither mailto:ADDRESS nor an http URL")
    except (
        OSError,  # urllib's own errors are some of these
        subprocess.SubprocessError,
        http.client.HTTPException,
        ValueError,  # what is no URL after all
    ) as error:
        raise CannotTell(f"{type(error).__name__}: {error}") from error


def messages(folder: RunFolder, goes_back: bool) -> list[str]:
    """What is to be told after an attempt at ``folder``'s run has ended."""
    if goes_back:
        return []
    scale, told = folder.path.parent, []
    experiment = f"{scale.parent.name}/{scale.name}"
    end = folder.end
    if folder.done is None and end is not None:
        told.append(
            f"{experiment}: {folder.name} {end['reason']}\npython -m harness.why {folder.name}"
        )
    queue, jobs = read_json(scale / "queue.json") or {"order": []}, job_ids(scale)
    work = queue.get("work", {})
    asked = (RunFolder(scale / name) for name in queue["order"] if name in work or name in jobs)
    every = [run for run in asked if (run.path / "run.json").exists()]  # a folder may be removed
    if all(_ended(run, work, jobs) for run in every) and _first(folder, every):
        done = sum(run.done is not None for run in every)
        told.append(f"{experiment}: all has ended, {done} of {len(every)} runs done")
    return told


def _ended(run: RunFolder, work: dict[str, int], jobs: dict[str, str]) -> bool:
    """True where nothing that was asked for will still start ``run``; of one whose need was lost, nothing will."""
    if run.done is not None:
        return True
    if any(need.done is None and _ended(need, work, jobs) for need in run.needs):
        return True
    end = run.end
    if end is None or end.get("requeued"):
        return False
    if run.name in jobs:  # a later job than the last attempt's is another attempt to come
        return jobs[run.name] == job_of(read_json(run.attempts[-1] / "start.json") or {})
    return not is_asked_for(run, work)


def _first(folder: RunFolder, every: list[RunFolder]) -> bool:
    """True for one of the jobs that see the end at the same time; again after a later attempt at any run."""
    state = digest([[run.name, len(run.attempts)] for run in every])[:16]
    try:
        os.close(os.open(folder.path.parent / f".ended-{state}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def after(folder: RunFolder, *, goes_back: bool) -> None:
    """Tell what is to be told where somebody wants to know."""
    where = os.environ.get(VARIABLE)
    if not where:
        return
    try:
        for text in messages(folder, goes_back):
            send(text, where)
    except (
        CannotTell,
        OSError,
    ) as error:  # a full disk or a lost folder is no reason to fail a job
        print(f"no notice was sent: {error}", file=sys.stderr)


def main(text: Annotated[str, typer.Argument(help="a message, to see whether it arrives")]) -> None:
    """Send a message to where MOLT_NOTIFY says. Exit codes: 0 sent; 2 not, with the reason."""
    try:
        send(text, os.environ.get(VARIABLE, ""))
    except CannotTell as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    typer.run(main)
