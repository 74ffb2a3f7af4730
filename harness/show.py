"""What a person sees of a submit: the dry run, what will be started, live progress, how it ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from harness.expand import Expansion, Run, arms_difference, protocol_of
from harness.queue import LOOKS_SHARE
from harness.run_status import RunStatus, at_work, read_statuses
from harness.table import STYLES, duration, reasons, table

PLAIN_EVERY_S = 20.0
"""Seconds between progress lines where the output is not a terminal."""
DRAW_S = 0.5
MIN_ROWS = 12
"""Runs that a live picture shows at least, whatever the height of the terminal."""


def as_data(expansion: Expansion, runs: Sequence[Run], obstacles: list[str]) -> dict[str, Any]:
    """The dry run for machines."""
    return {
        "experiment": expansion.experiment.name,
        "scale": expansion.scale.name,
        "folder": str(expansion.folder),
        "protocol": protocol_of(expansion.runs[0].config),
        "arms_difference": arms_difference(expansion.scale),
        "resources": expansion.scale.resources.model_dump(mode="json"),
        "code": expansion.snapshot.hash,
        "runs": [
            {
                "run": run.name,
                "kind": run.kind,
                "system": run.system,
                "seed": run.seed,
                "identity": run.identity,
                "folder": str(expansion.folder / run.name),
                "needs": list(run.needs),
            }
            for run in runs
        ],
        "power": _prospects(expansion),
        "obstacles": obstacles,
    }


def dry_run(
    console: Console,
    expansion: Expansion,
    runs: Sequence[Run],
    obstacles: list[str],
    changed: list[str],
) -> None:
    """Protocol, the arms' differences, endpoints and every run; nothing is written."""
    experiment, scale = expansion.experiment, expansion.scale
    console.rule(f"{experiment.name} / {scale.name}", align="left")
    console.print(Text(experiment.question.strip(), style="italic"))
    console.print("\n[bold]Protocol[/], the same for every arm")
    protocol = protocol_of(expansion.runs[0].config)
    text = yaml.safe_dump(
        protocol, sort_keys=False, default_flow_style=None, width=console.width - 4
    )
    plain = not console.is_terminal
    console.print(
        Padding(
            text.rstrip() if plain else Syntax(text.rstrip(), "yaml", background_color="default"),
            (0, 2),
        ),
        highlight=False,
    )
    console.print("\n[bold]The arms differ in[/]")
    names = [arm.name for arm in experiment.arms]
    shown = Table(box=None, padding=(0, 2))
    shown.add_column("")
    for arm in experiment.arms:
        shown.add_column(f"{arm.name} ({arm.role})", overflow="fold")
    for key, row in arms_difference(scale).items():
        shown.add_row(key, *("-" if row[name] is None else str(row[name]) for name in names))
    console.print(shown)
    console.print("\n[bold]Endpoints[/]")
    for endpoint in experiment.endpoints:
        ratio = endpoint.scale == "ratio"
        margin = f"{endpoint.margin:.0%}" if ratio else f"{endpoint.margin} {endpoint.unit}"
        console.print(
            f"  [bold]{escape(endpoint.name)}[/]{' (primary)' if endpoint.primary else ''}: "
            f"{escape(str(endpoint.field))}, {endpoint.summary}; {endpoint.direction} is better, margin {escape(margin)}",
            highlight=False,
        )
        console.print(Padding(Text(endpoint.margin_reason.strip(), style="dim"), (0, 4)))
    what_runs_can_show(console, expansion)
    resources = scale.resources
    devices = (
        f" x {resources.devices_per_node} {resources.device}" if resources.devices_per_node else ""
    )
    console.print(
        f"\n[bold]Runs[/], in the order they start; each on {resources.nodes} node{'s' * (resources.nodes > 1)}{devices}, "
        f"{resources.cpus_per_node} cores, at most {resources.time_limit}"
        f"{'; warm-up and conformance on one node' if resources.nodes > 1 else ''}"
    )
    shown = Table(box=None, padding=(0, 2))
    for column in ("", "run", "identity", "waits for"):
        shown.add_column(column, no_wrap=column == "run", overflow="fold")
    for number, run in enumerate(runs, start=1):
        needs = ", ".join(name.rpartition("-")[0] for name in run.needs) or "-"
        shown.add_row(str(number), run.name, run.identity[:16], needs)
    console.print(shown)
    console.print(f"\nFolder {expansion.folder}/, code {expansion.snapshot.hash[:16]}.")
    if changed:
        console.print(_amended(changed), highlight=False)
    for obstacle in obstacles:
        console.print(f"[red]Would be refused here:[/] {escape(obstacle)}", highlight=False)
    console.print("Dry run: nothing was started and nothing was written.")


def scripts(console: Console, texts: Sequence[tuple[str, str]]) -> None:
    """What sbatch would be given."""
    for name, text in texts:
        console.rule(f"sbatch: {name}", align="left")
        console.print(text.rstrip(), markup=False, highlight=False, soft_wrap=True)


def what_runs_can_show(console: Console, expansion: Expansion) -> None:
    """Power before the money is spent, by the spread of the runs that are finished where there are some."""
    console.print(f"\n[bold]What {len(expansion.scale.seeds)} runs a side can show[/]")
    for line in _prospects(expansion):
        console.print(Padding(Text(line), (0, 2)))


def _prospects(expansion: Expansion) -> list[str]:
    """One sentence an endpoint."""
    from analysis.power import (
        prospects,
    )  # here: scipy takes a second that most commands need not wait

    scale = expansion.scale
    endpoints, seeds = expansion.experiment.endpoints, len(scale.seeds)
    return prospects(endpoints, seeds, expansion.folder, alpha=scale.rules.alpha)


def submitted(
    console: Console,
    expansion: Expansion,
    start: list[str],
    leave: list[tuple[str, str]],
    changed: list[str],
) -> None:
    """What this submit starts and what it leaves alone."""
    where = f"{expansion.experiment.name}/{expansion.scale.name}"
    done = sum(why == "DONE" for _, why in leave)
    counts = [f"{len(start)} to run", f"{done} done before"]
    console.print(f"[bold]{where}[/]: {', '.join(counts)}, in {expansion.folder}/")
    if changed:
        console.print(_amended(changed), highlight=False)
    alike: dict[str, list[str]] = {}
    for name, why in leave:
        if why != "DONE":
            alike.setdefault(why, []).append(name)
    for why, names in alike.items():
        console.print(f"  left alone: {some(names)}: {why}", markup=False, highlight=False)
    if start:
        what_runs_can_show(console, expansion)


def some(names: Sequence[str]) -> str:
    """The first of ``names``, and how many more."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _amended(changed: list[str]) -> str:
    code = " (code or protocol changed: the runs are new ones)" if "identities" in changed else ""
    return (
        f"[yellow]Differs from the frozen plan[/] in {', '.join(changed)}{code}; plan.json and the report keep it as an "
        "amendment."
    )


def ended(console: Console, expansion: Expansion, statuses: list[RunStatus]) -> None:
    """The table at the end, and the reasons of what is not done."""
    done = sum(status.state == "DONE" for status in statuses)
    where = f"{expansion.experiment.name}/{expansion.scale.name}"
    console.print(table(statuses, f"{where}: {done} of {len(statuses)} runs done"))
    for reason in reasons(statuses, expansion.folder):
        console.print(reason, style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def board(console: Console, folder: Path) -> Iterator[Callable[[], None]]:
    """Live progress; yields the function that draws it. Plain lines where the output is not a terminal."""
    if not console.is_terminal:
        yield _PlainLines(console, folder)
        return
    rows = max(MIN_ROWS, console.height - 4)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda: live.update(_picture(folder, rows), refresh=True)


def watch_all(console: Console, folders: Sequence[Path]) -> None:
    """Live progress of every folder until nothing works in any; ends at Ctrl-C, and the runs go on."""
    try:
        with ExitStack() as stack:
            if console.is_terminal:
                live = stack.enter_context(Live(console=console, auto_refresh=False))
                share = max(MIN_ROWS, (console.height - 2) // len(folders) - 3)

                def draw() -> None:
                    live.update(
                        Group(*(_picture(f, share, titled=True) for f in folders)), refresh=True
                    )
            else:
                lines = [_PlainLines(console, folder) for folder in folders]

                def draw() -> None:
                    for line in lines:
                        line()

            follow(lambda: any(at_work(folder) for folder in folders), draw)
            draw()
    except KeyboardInterrupt:
        console.print("The runs go on; python -m harness.cancel stops them.")
        return
    for folder in folders:
        if not console.is_terminal:  # its lines tell of what changed while one looked
            console.print(table(read_statuses(folder), f"{folder.parent.name}/{folder.name}"))
        for reason in reasons(read_statuses(folder), folder):
            console.print(reason, markup=False, highlight=False, soft_wrap=True)


def follow(at_work: Callable[[], bool], draw: Callable[[], None]) -> None:
    """Draw while others work."""
    while at_work():
        began = time.monotonic()
        draw()
        time.sleep(max(DRAW_S, LOOKS_SHARE * (time.monotonic() - began)))


def time_left_s(statuses: Sequence[RunStatus]) -> float | None:
    """Seconds until all is done, one run after the other: what each running one has left, and for each that waits the
    mean of the runs of its kind. None before one of the kind can be judged."""
    total = 0.0
    for status in statuses:
        if status.state == "RUNNING" and status.left_s is not None:
            total += status.left_s
        elif status.state in ("WAITING", "RUNNING"):
            expected = _expected_s(status, statuses)
            if expected is None:
                return None
            spent = status.elapsed_s or 0.0 if status.state == "RUNNING" else 0.0
            total += max(0.0, expected - spent)
    return total


def _expected_s(status: RunStatus, statuses: Sequence[RunStatus]) -> float | None:
    alike = [s for s in statuses if s.kind == status.kind]
    took = [s.elapsed_s for s in alike if s.state == "DONE" and s.elapsed_s]
    took = took or [s.elapsed_s + s.left_s for s in alike if s.elapsed_s and s.left_s is not None]
    return sum(took) / len(took) if took else None


def _picture(folder: Path, rows: int = MIN_ROWS, titled: bool = False) -> Group:
    """What works and what went wrong, then what is done and waits as far as ``rows`` reach."""
    statuses = read_statuses(folder)
    left = time_left_s(statuses)
    done = sum(status.state == "DONE" for status in statuses)
    title = f"{folder.parent.name}/{folder.name}: " if titled else ""
    told = "time left not known yet" if left is None else f"about {duration(left)} left"
    if done == len(statuses):
        told = "nothing left to do"
    lines: list[Any] = [Text(f"{title}{done} of {len(statuses)} runs done, {told}", style="bold")]
    quiet = [status for status in statuses if status.state in ("DONE", "WAITING", "PLANNED")]
    hidden = quiet[max(0, rows - (len(statuses) - len(quiet))) :]
    shown = Table.grid(padding=(0, 1), expand=True)
    for ratio in (None, None, 1, None):
        shown.add_column(no_wrap=True, overflow="ellipsis", ratio=ratio)
    for status in statuses:
        if status not in hidden:
            shown.add_row(*_row(status))
    counts = Counter(status.state.lower() for status in hidden)
    more = ", ".join(f"{count} {state}" for state, count in counts.items())
    return Group(*lines, shown, *([Text(f"and {more}", style="dim")] if more else []))


def _row(status: RunStatus) -> tuple[Any, ...]:
    """Word, run, what there is to say of it, time."""
    if status.state == "DONE":
        reward = "" if status.reward_mean is None else f"reward {status.reward_mean:.3f}"
        return "[green]done[/]", status.run, reward, duration(status.elapsed_s)
    if status.state == "RUNNING":
        return "[cyan]now[/]", status.run, _bar(status), _clock(status)
    if status.state in ("WAITING", "PLANNED"):
        word = "waits" if status.state == "WAITING" else "planned"
        return f"[dim]{word}[/]", f"[dim]{status.run}[/]", Text(status.why, style="dim"), ""
    color = STYLES.get(status.state, "red")
    return f"[{color}]{status.state.lower()}[/]", status.run, Text(status.why), ""


def _bar(status: RunStatus, width: int = 8) -> Text:
    """How far it is; the phase where it is not the ordinary one."""
    phase = "" if status.phase == "training" else f"{status.phase} "
    if not status.steps:
        return Text(phase)
    full = round(width * (status.step or 0) / status.steps)
    reward = "" if status.reward_mean is None else f" reward {status.reward_mean:.3f}"
    said = f" {phase}{status.step or 0}/{status.steps}{reward}"
    return Text.assemble(("━" * full, "cyan"), ("━" * (width - full), "dim"), said)


def _numbers(status: RunStatus) -> str:
    parts = [status.phase or ""]
    if status.steps:
        parts.append(f"step {status.step}/{status.steps}")
    if status.reward_mean is not None:
        parts.append(f"reward {status.reward_mean:.3f}")
    return "  ".join(parts)


def _clock(status: RunStatus) -> str:
    if status.left_s is None:
        return f"for {duration(status.elapsed_s)}"
    return f"{duration(status.left_s)} left"


class _PlainLines:
    """A line when a run starts or ends, and one every PLAIN_EVERY_S seconds of each that works."""

    def __init__(self, console: Console, folder: Path) -> None:
        self.console, self.folder = console, folder
        self.states: dict[str, str] = {}
        self.said_at = 0.0
        self.waits_for = ""

    def __call__(self) -> None:
        statuses = read_statuses(self.folder)
        done = sum(status.state == "DONE" for status in statuses)
        due = time.monotonic() - self.said_at >= PLAIN_EVERY_S
        waiting = next((s for s in statuses if s.state == "WAITING" and s.why), None)
        if waiting is not None and waiting.why != self.waits_for:
            self._say(waiting, statuses, done)
            self.waits_for = waiting.why
        for status in statuses:
            changed = self.states.get(status.run) != status.state
            working = status.state == "RUNNING"
            first = status.run not in self.states and not working
            if (changed and not first) or (working and due):
                self._say(status, statuses, done)
                if working:
                    self.said_at = time.monotonic()
            self.states[status.run] = status.state

    def _say(self, status: RunStatus, statuses: Sequence[RunStatus], done: int) -> None:
        parts = [f"[{done}/{len(statuses)}]", status.run, status.state.lower()]
        if status.state == "RUNNING":
            left = time_left_s(statuses)
            parts.append(_numbers(status))
            parts.append(_clock(status))
            parts += [] if left is None else [f"(all: {duration(left)})"]
        elif status.state == "DONE":
            parts.append(f"in {duration(status.elapsed_s)}")
        elif status.why:
            parts.append(status.why)
        self.console.print("  ".join(parts), markup=False, highlight=False, soft_wrap=True)
