"""Why a run ended, or waits:  python -m harness.why RUN

The cause in a word and a sentence, what to do about it, every attempt with its node, and the lines that matter: the error, then
the last words of the driver, the trainer, the engine and the agents, each apart. RUN is a name or a part of one.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.avoid import last_decision
from harness.causes import cause
from harness.outcome import last_lines
from harness.redaction import redact
from harness.run_folder import RunFolder, read_json, run_folders, scale_folders
from harness.run_status import RunStatus, read_statuses
from harness.table import duration

SPEAKER = re.compile(r"^\((?P<name>[\w.]+)[^)]*?pid=\d+[^)]*\)\s*(?P<text>.*)$")
"""How Ray and vLLM begin a line of another process."""
PARTS = {
    "trainer": re.compile(r"train|fsdp|megatron|rank", re.IGNORECASE),
    "engine": re.compile(r"engine|vllm|gpu_?worker|cpu_?worker|rollout", re.IGNORECASE),
    "agents": re.compile(r"agent|env", re.IGNORECASE),
}
WAITING = {
    "JobHeldUser": "`scontrol release {job}` lets it go.",
    "JobHeldAdmin": "Ask the cluster's people; they hold it.",
    "launch failed requeued held": "See what failed on its node, then `scontrol release {job}`.",
    "BadConstraints": "Take nodes out of the profile's exclude, then `python -m harness.cancel` it and submit again.",
    "PartitionTimeLimit": "Its time limit is over the partition's: lower it, `python -m harness.cancel` it, submit again.",
    "DependencyNeverSatisfied": "See the run it needs first.",
}
"""What to do where a job waits for more than its turn, by Slurm's word for it."""
COLOR = re.compile(r"\x1b\[[0-9;]*m")
ERROR = re.compile(r"(Error|Exception|Traceback|FATAL|CRITICAL|Killed|Aborted|Fatal Python)\b")


@dataclass(frozen=True)
class Account:
    """Everything that is known of why a run is where it is."""

    status: RunStatus
    folder: str
    attempts: list[dict[str, Any]]
    error: list[str]
    words: dict[str, list[str]]
    stacks: list[str]
    avoids: list[str]
    """Nodes that the experiment avoids, or for a reason does not though runs failed there."""

    @property
    def advice(self) -> str:
        stuck = (do for word, do in WAITING.items() if f"({word})" in self.status.why)
        return {
            "RUNNING": "Nothing: it works.",
            "WAITING": next(stuck, "Nothing: Slurm or the queue will start it.").format(
                job=self.status.job
            ),
            "PLANNED": "Submit it.",
            "UNKNOWN": "Look again when the scheduler answers. Nobody has called it dead.",
        }.get(self.status.state, cause(self.status.state).advice)


def find_run(
    runs_dir: Path, name: str, experiment: str | None = None, scale: str | None = None
) -> RunFolder:
    """The one run whose name is, or contains, ``name``; runs of the last submit before those of earlier code or protocol.

    Raises FileNotFoundError that names what there is.
    """
    folders = scale_folders(runs_dir, experiment, scale)
    every = [run for folder in folders for run in run_folders(folder)]
    exact = [run for run in every if run.name == name]
    partly = [run for run in every if name in run.name]
    order = {f: (read_json(f / "queue.json") or {"order": []})["order"] for f in folders}
    current = [run for run in partly if run.name in order[run.path.parent]]
    begin = [run for run in current if run.name.startswith(name)]  # not a control of that arm too
    found = exact or begin or current or partly
    if len(found) == 1:
        return found[0]
    listed = ", ".join(run.name for run in found or every)
    problem = "no run's name contains it"
    if found:
        problem = f"{len(found)} runs have it (--experiment and --scale tell them apart, or more of the name)"
    raise FileNotFoundError(f"{name}: {problem}; there is {listed}")


def account(folder: RunFolder) -> Account:
    """Read why ``folder``'s run is where it is."""
    statuses = read_statuses(folder.path.parent, earlier=True)
    status = next(status for status in statuses if status.run == folder.name)
    attempts = [_attempt(path) for path in folder.attempts]
    log = last_lines(folder.attempts[-1] / "output.log", 2000, 1 << 20) if attempts else []
    log = redact([COLOR.sub("", line) for line in log])
    stacks = sorted((folder.attempts[-1] / "stacks").rglob("*.txt")) if attempts else []
    written = [str(file) for file in stacks if file.stat().st_size > 0]
    error = [] if status.state == "DONE" else error_lines(log)
    avoids = last_decision(folder.path.parent).lines()
    return Account(status, str(folder.path), attempts, error, by_speaker(log), written, avoids)


def _attempt(path: Path) -> dict[str, Any]:
    start, end = read_json(path / "start.json") or {}, read_json(path / "end.json") or {}
    return {
        "attempt": int(path.name),
        "state": end.get("state", "no word"),
        "node": start.get("slurmd_nodename") or start.get("host", "-"),
        "to_step": end.get("step"),
        "took_s": end.get("duration_s"),
        "why": end.get("reason", ""),
    }


def error_lines(log: list[str], most: int = 12) -> list[str]:
    """The last error of a log: from the last traceback's start, or the last line that names one; [] where none does."""
    named = [number for number, line in enumerate(log) if ERROR.search(line)]
    if not named:
        return []
    starts = [number for number in named if "Traceback" in log[number]]
    begin = starts[-1] if starts and starts[-1] >= named[-1] - 60 else named[-1]
    block = log[begin : named[-1] + 1]
    return block if len(block) <= most else [*block[:2], "...", *block[3 - most :]]


def by_speaker(log: list[str], most: int = 4) -> dict[str, list[str]]:
    """The last lines of driver, trainer, engine and agents, those that spoke."""
    found: dict[str, list[str]] = {}
    for line in log:
        said = SPEAKER.match(line)
        text = said["text"] if said else line
        part = "driver"
        if said:
            known = (name for name, pattern in PARTS.items() if pattern.search(said["name"]))
            part = next(known, said["name"])
        if text.strip():
            found.setdefault(part, []).append(text.rstrip()[:300])
    return {part: lines[-most:] for part, lines in found.items()}


def show(console: Console, told: Account) -> None:
    status = told.status
    head = Table.grid(padding=(0, 2))
    where = " ".join(filter(None, [status.node, f"job {status.job}" if status.job else None]))
    meaning = (
        ""
        if status.state in ("RUNNING", "WAITING", "PLANNED", "UNKNOWN")
        else cause(status.state).meaning
    )
    rows = {
        "state": f"{status.state}  {meaning}",
        "why": status.why,
        "where": where,
        "do": told.advice,
    }
    for name, text in rows.items():
        if text:
            head.add_row(Text(name, style="bold"), Text(text))
    console.rule(status.run, align="left")
    console.print(head)
    shown = Table(box=None, padding=(0, 2), title="attempts", title_justify="left")
    for column in ("", "ended", "node", "to step", "took", "why"):
        shown.add_column(column, overflow="fold")
    for one in told.attempts:
        step = "-" if one["to_step"] is None else str(one["to_step"])
        reason = one["why"].removeprefix(f"{one['state']}: ").removeprefix(one["state"])
        shown.add_row(
            f"{one['attempt']:02d}",
            one["state"],
            one["node"],
            step,
            duration(one["took_s"]),
            Text(reason),
        )
    if told.attempts:
        console.print(shown)
    sections = {"error": told.error} if told.error else {}
    sections |= {f"last words of {part}": lines for part, lines in told.words.items()}
    sections |= {"stacks": told.stacks} if told.stacks else {}
    sections |= {"nodes of this experiment": told.avoids} if told.avoids else {}
    for title, lines in sections.items():
        console.print(Text(title, style="bold"))
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    if told.attempts:
        log = f"{told.folder}/attempts/{told.attempts[-1]['attempt']:02d}/output.log"
        console.print(f"All of it: {log}", highlight=False, soft_wrap=True)


def main(
    run: Annotated[str, typer.Argument(help="a run's name, or a part that only it has")],
    experiment: Annotated[str | None, typer.Option(help="only of this experiment")] = None,
    scale: Annotated[str | None, typer.Option(help="only of this scale")] = None,
    runs: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="for machines, on stdout")] = False,
) -> None:
    """Say why a run ended or waits, with the lines that matter and what to do.

    Exit codes: 0 told; 2 there is no such run.
    """
    try:
        told = account(find_run(runs, run, experiment, scale))
    except FileNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    if as_json:
        print(json.dumps(asdict(told) | {"advice": told.advice}))
    else:
        show(Console(), told)


if __name__ == "__main__":
    typer.run(main)
