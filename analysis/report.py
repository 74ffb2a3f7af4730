"""Judge an experiment's runs and write what may be said: a page, Markdown, LaTeX tables, and JSON for machines.

    python -m analysis.report moe_vl                        reads the one scale of runs/moe_vl that has a plan
    python -m analysis.report moe_vl --scale cluster --json

Writes ``report.html`` (self-contained), ``report.md``, ``report.tex`` and ``report.json`` into
``runs/<experiment>/<scale>/report/``. report.json is the report (``report_data.py``); the others are views of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from analysis import latex, plots, plots_runs, wording
from analysis.calibration import ALLOWED, Cell, cells, grids
from analysis.inference import Verdict
from analysis.load import Experiment, LoadError, load_experiment
from analysis.plan import PlanError
from analysis.report_data import report_data
from analysis.verdict import EndpointResult, judge

GLYPHS = {
    Verdict.EQUIVALENT: "\u2248",
    Verdict.NON_INFERIOR: "\u2265",
    Verdict.DIFFERENT: "\u2260",
    Verdict.INCONCLUSIVE: "?",
    Verdict.INVALID: "\u00d7",
}
TERMINAL_STYLES = {
    Verdict.EQUIVALENT: "green",
    Verdict.NON_INFERIOR: "green",
    Verdict.DIFFERENT: "yellow",
    Verdict.INCONCLUSIVE: "cyan",
    Verdict.INVALID: "red",
}


def write_report(folder: str | Path) -> dict[str, Any]:
    """Judge ``runs/<experiment>/<scale>`` and write its report; returns the data. Raises PlanError, LoadError."""
    experiment = load_experiment(folder)
    results = judge(experiment)
    data = report_data(experiment, results)
    target = experiment.folder / "report"
    target.mkdir(exist_ok=True)
    (target / "report.json").write_text(json.dumps(data, indent=2, allow_nan=False) + "\n")
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        autoescape=lambda name: name is not None and ".html" in name,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["number"] = wording.number
    templates.filters["cell"] = _cell
    shared = {"report": data, "glyphs": {verdict.value: glyph for verdict, glyph in GLYPHS.items()}}
    page = templates.get_template("report.html.j2").render(
        **shared, figures=_figures(experiment, results), calibration=_calibration()
    )
    (target / "report.html").write_text(page)
    (target / "report.md").write_text(templates.get_template("report.md.j2").render(**shared))
    (target / "report.tex").write_text(latex.report_tables(data))
    return data


def verdict_table(data: dict[str, Any]) -> Table:
    """The verdicts for a terminal."""
    table = Table(
        title=escape(f"{data['experiment']} ({data['scale']}): {data['question']}"),
        title_justify="left",
    )
    level = f"{100 - 100 * data['alpha']:g}\u202f%"
    for heading in ("endpoint", f"difference, {level} interval", "margin", "verdict"):
        table.add_column(heading)
    for e in data["endpoints"]:
        table.add_row(
            escape(
                f"{e['name']}{' *' if e['primary'] else ''}\n"
                f"{e['candidate']} vs {e['baseline']}, {e['n']} and {e['n_baseline']} runs"
            ),
            f"{e['estimate_text']}\n{e['ci_text']}",
            escape(e["margin_text"]),
            Text(e["headline"], style=TERMINAL_STYLES[Verdict(e["verdict"])]),
        )
    table.caption = "* primary; differences read candidate minus baseline"
    return table


def _cell(value: Any) -> str:
    """A value inside a Markdown table, where a bar would end the cell and a line break the table."""
    return " ".join(str(value).split("\n")).replace("|", "\\|")


def _figures(experiment: Experiment, results: tuple[EndpointResult, ...]) -> dict[str, Any]:
    """Name -> figure; those that tell arms apart are left out where the arms are too many for it."""
    figures = {
        "forest": plots.forest(results),
        "power": plots_runs.power_curves(results),
        "parts": plots.step_parts(experiment),
        "too_many_arms": len(experiment.plan.arms) > plots.MOST_ARMS,
    }
    if figures["too_many_arms"]:
        return figures | {"runs": [], "timeline": "", "curves": [], "mismatch": ""}
    return figures | {
        "runs": plots.distributions(experiment, results),
        "timeline": plots_runs.timeline(experiment),
        "curves": [figure for figure in _curve_figures(experiment) if figure],
        "mismatch": plots.mismatch_and_lag(experiment),
    }


def _calibration() -> list[dict[str, Any]]:
    """The measured tables of false verdicts, as text."""
    return [
        {
            "title": grid.title,
            "corner": grid.corner,
            "headings": grid.headings,
            "rows": [(label, [_rates(cell) for cell in row]) for label, row in grid.rows],
        }
        for grid in grids(cells())
    ]


def _rates(cell: Cell) -> dict[str, Any]:
    text = " / ".join(f"{100 * rate:.1f}" for rate in cell.shown)
    return {"text": text, "bad": max(cell.shown) > ALLOWED}


def _curve_figures(experiment: Experiment) -> Iterator[str]:
    """Evaluation first, then training reward, then whatever else an endpoint follows by step."""
    fields = [e.field for e in experiment.plan.endpoints if isinstance(e.field, str)]
    for field in dict.fromkeys(["eval_reward_mean", "reward_mean", *fields]):
        label = field.removeprefix("eval_").removesuffix("_mean").replace("_", " ")
        if field.startswith("eval_"):
            yield plots.evaluation_curves(experiment, field, f"held-out {label}")
        else:
            yield plots.training_curves(experiment, field, f"training {label}")


def _only_scale(folder: Path) -> str:
    """The scale of an experiment's one plan. Raises PlanError where there is none or a choice."""
    scales = sorted(path.parent.name for path in folder.glob("*/plan.json"))
    if not scales:
        raise PlanError(
            f"{folder}/*/plan.json: no frozen plan; `python -m harness.submit` writes it"
        )
    if len(scales) > 1:
        raise PlanError(f"{folder}: several scales have a plan: say --scale {' or '.join(scales)}")
    return scales[0]


def main(arguments: list[str] | None = None) -> int:
    """Write the report and print the verdicts; returns 1 with one clear line where there is nothing to judge."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.report", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("experiment", help="name of the experiment, e.g. moe_vl")
    parser.add_argument("--scale", help="scale of the runs (default: the only one with a plan)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument("--json", action="store_true", help="print report.json instead of a table")
    options = parser.parse_args(arguments)
    try:
        folder = options.runs / options.experiment
        folder /= options.scale or _only_scale(folder)
        data = write_report(folder)
    except (PlanError, LoadError) as error:
        print(f"analysis.report: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(data, indent=2))
        return 0
    console = Console()
    console.print(verdict_table(data))
    console.print(f"report: {folder / 'report' / 'report.html'}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
