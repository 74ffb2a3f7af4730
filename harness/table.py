"""States of runs for a person: a table for a terminal, each reason once, times in words."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from harness.run_status import RunStatus

STYLES = {
    "DONE": "green",
    "RUNNING": "cyan",
    "WAITING": "dim",
    "PLANNED": "dim",
    "UNKNOWN": "yellow",
}


def duration(seconds: float | None) -> str:
    """7 s, 1:05, 2:03:00; a dash where there is none."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def table(statuses: list[RunStatus], title: str) -> Table:
    """For a terminal of 80 columns where it can be: a column that says the same of every run is left out."""
    columns = {
        "run": [status.run for status in statuses],
        "state": [_colored(status.state) for status in statuses],
        "phase": [status.phase or "-" for status in statuses],
        "step": [_step(status) for status in statuses],
        "reward": ["-" if s.reward_mean is None else f"{s.reward_mean:.3f}" for s in statuses],
        "took": [duration(status.elapsed_s) for status in statuses],
        "left": [duration(status.left_s) for status in statuses],
        "attempt": [str(status.attempt or "-") for status in statuses],
        "node": [status.node or "-" for status in statuses],
    }
    telling = {"attempt": {"-", "1"}, "node": {"-"}, "phase": {"-"}, "left": {"-"}}
    # On a machine's own queue every run has this machine's name.
    if len({s.node for s in statuses if s.node}) < 2 and not any(s.job for s in statuses):
        columns.pop("node")
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    kept = {name: cells for name, cells in columns.items() if set(cells) - telling.get(name, set())}
    for name, cells in kept.items():
        right = name not in ("run", "state", "phase", "node")
        widest = max(Text.from_markup(cell).cell_len for cell in [name, *cells])
        least = None if name == "run" else widest  # where it is narrow, names lose their end first
        shown.add_column(name, justify="right" if right else "left", no_wrap=True, min_width=least)
    for row in zip(*kept.values()):
        shown.add_row(*row)
    return shown


def _colored(state: str) -> str:
    return f"[{STYLES.get(state, 'red')}]{state}[/]"


def _step(status: RunStatus) -> str:
    if not status.steps:
        return "-"
    return f"{'-' if status.step is None else status.step}/{status.steps}"


def log_of(folder: Path, status: RunStatus) -> Path:
    return folder / status.run / "attempts" / f"{status.attempt:02d}" / "output.log"


def reasons(statuses: list[RunStatus], folder: Path) -> list[str]:
    """Why runs are not done, each reason once, and where to read on."""
    alike: dict[tuple[str, str], list[RunStatus]] = {}
    for status in statuses:
        if status.why:
            alike.setdefault((status.state, status.why), []).append(status)
    lines = []
    for (state, why), found in alike.items():
        first, more = found[0], f" and {len(found) - 1} more" if len(found) > 1 else ""
        lines.append(f"{first.run}{more} {state}: {why}")
        if first.attempt:
            lines.append(f"    {log_of(folder, first)}")
    if lines:
        lines.append("What to do: python -m harness.why RUN")
    return lines
