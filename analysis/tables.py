"""The paper's tables (arXiv 2607.21653), made from code and from runs, beside the published figures and never from them.

    python -m analysis.tables                                   all three: Markdown, LaTeX and JSON under runs/paper/
    python -m analysis.tables table1 --peer molt=peers/molt     a checkout or unpacked wheel counted beside its published size
    python -m analysis.tables table3 --json

Every row says what its figures are: measured (on what, how many runs), published, or not built yet. The definitions are
experiments/paper/*.yaml; the runs are made by ``python -m harness.submit experiments/paper/...``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from analysis import latex
from analysis.loc import count, package_root
from analysis.paper_rows import feature_rows, protocol_rows, throughput_rows

ROOT = Path(__file__).resolve().parent.parent
PAPER = ROOT / "experiments" / "paper"
NAMES = ("table1", "table2", "table3")


class TableError(ValueError):
    """A definition or an option that makes no table; the message says what to change."""


@dataclass(frozen=True)
class Table:
    """A table as data. ``rows``: cells as text, one origin each (the last column); notes stand below it."""

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def code_size(definition: Mapping[str, Any], peers: Mapping[str, Path]) -> Table:
    """Table 1: ours counted here, peers counted where a checkout was given, and what was published of each."""
    unknown = sorted(set(peers) - set(definition["systems"]))
    if unknown:
        raise TableError(f"--peer {unknown[0]}: the systems are {', '.join(definition['systems'])}")
    rows, notes = [], []
    for name, system in definition["systems"].items():
        where = ROOT / system["root"] if "root" in system else peers.get(name)
        if where is not None:
            root = package_root(where, system["package"])
            try:
                found = count(root, system["package"], system["entry"])
            except ValueError as error:
                raise TableError(f"{name}: {error}") from error
            sizes = (f"{found.code_lines:,}", f"{found.files}", f"{found.tokens:,}")
            origin = f"measured{_release(where)} from {system['entry']}"
            rows.append((name, *sizes, origin))
        if "published" in system:
            published = system["published"]
            rows.append(
                (name, f"about {published['code_lines']:,}", "\u2013", "\u2013", f"published, commit {published['commit']}")
            )  # fmt: skip
        if "note" in system:
            notes.append(f"{name}: {system['note'].strip()}")
    rule = "Not counted: blank lines, comments, docstrings, imports under TYPE_CHECKING, modules that the entry does not reach."
    columns = ("system", "code lines", "files", "tokens", "origin")
    return Table(
        "table1", definition["title"], definition["caption"], columns, tuple(rows), (rule, *notes)
    )


def _release(folder: Path) -> str:
    """ " NAME-VERSION" of an unpacked wheel, "" of a checkout."""
    found = sorted(folder.glob("*.dist-info"))
    return f" in {found[0].name.removesuffix('.dist-info')}" if found else ""


def engine_features(definition: Mapping[str, Any], runs: Path) -> Table:
    """Table 2: each switch measured where it is built and was run, as published, or as not built."""
    rows = [
        row
        for name, s in definition["switches"].items()
        for row in feature_rows(name, s, runs, PAPER)
    ]
    columns = ("switch", "off", "on", "effect", "origin")
    return Table("table2", definition["title"], definition["caption"], columns, tuple(rows))


def throughput(definition: Mapping[str, Any], runs: Path) -> tuple[Table, Table]:
    """Table 3 from runs beside the published rows, and the protocol line by line."""
    published = definition["published"]
    rows, notes = throughput_rows(definition, runs)
    columns = ("system", "s/step", "tokens/device/s", "identity", "origin")
    table = Table(
        "table3", published["title"], definition["question"].strip(), columns, rows,
        (*notes, " ".join(published["caveat"].split())),
    )  # fmt: skip
    lines = Table(
        "table3-protocol",
        "The protocol of table 3, line by line",
        "What the paper states, and what the experiment file at the published size runs.",
        ("line", "paper", "here"),
        protocol_rows(definition),
        ("unknown: no source gives it; the value here is this file's choice.",),
    )
    return table, lines


def build(names: Sequence[str], runs: Path, peers: Mapping[str, Path]) -> list[Table]:
    """The named tables. Raises TableError."""
    tables: list[Table] = []
    for name in names:
        definition = _definition(name)
        if name == "table1":
            tables.append(code_size(definition, peers))
        elif name == "table2":
            tables.append(engine_features(definition, runs))
        else:
            tables += throughput(definition, runs)
    return tables


def _definition(name: str) -> dict[str, Any]:
    (path,) = PAPER.glob(f"{name}_*.yaml")
    return yaml.safe_load(path.read_text())


def markdown(table: Table) -> str:
    """A Markdown section."""

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    lines = [f"## {table.title}", "", table.caption, "", row(table.columns)]
    lines += ["|" + "---|" * len(table.columns), *map(row, table.rows), ""]
    return "\n".join([*lines, *(f"- {note}" for note in table.notes), ""])


def as_latex(table: Table) -> str:
    """A booktabs table; the notes go into its caption."""
    text = " ".join([table.title + ".", table.caption, *table.notes])
    figures = "r" if len(table.columns) > 3 else "l"  # the protocol is words
    alignment = "l" + figures * (len(table.columns) - 2) + "l"
    return latex.table(text, table.name, alignment, [table.columns, *table.rows])


def show(table: Table) -> RichTable:
    """For a terminal."""
    shown = RichTable(title=Text(table.title), title_justify="left", caption_justify="left")
    for column in table.columns:
        shown.add_column(column, overflow="fold")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    shown.caption = Text("\n".join(table.notes))
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Write and print the tables; returns 1 with one clear line where one cannot be made."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.tables", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="table1, table2, table3")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument("--out", type=Path, help="folder to write into (default: RUNS/paper)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")
    options = parser.parse_args(arguments)
    try:
        wrong = [name for name in options.tables if name not in NAMES]
        if wrong:
            raise TableError(f"{wrong[0]}: the tables are {', '.join(NAMES)}")
        peers = dict(_peer(text) for text in options.peer)
        tables = build(options.tables or NAMES, options.runs, peers)
    except ValueError as error:
        print(f"analysis.tables: {error}", file=sys.stderr)
        return 1
    out = options.out or options.runs / "paper"
    out.mkdir(parents=True, exist_ok=True)
    data = {"schema_version": 1, "tables": [asdict(table) for table in tables]}
    (out / "tables.json").write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    (out / "tables.md").write_text("\n".join(map(markdown, tables)))
    (out / "tables.tex").write_text("\n".join(map(as_latex, tables)))
    if options.json:
        print(json.dumps(data, indent=2, ensure_ascii=False))
        return 0
    console = Console()
    for table in tables:
        console.print(show(table))
    console.print(f"tables: {out / 'tables.md'}", soft_wrap=True)
    return 0


def _peer(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not folder or not Path(folder).is_dir():
        raise TableError(f"--peer {text}: write NAME=DIR, DIR a checkout or an unpacked wheel")
    return name, Path(folder)


if __name__ == "__main__":
    sys.exit(main())
