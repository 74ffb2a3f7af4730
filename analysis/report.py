"""Judge an experiment's runs and write what may be said: a page, a Markdown file, and JSON for machines.

    python -m analysis.report moe_vl                        reads the one scale of runs/moe_vl that has a plan
    python -m analysis.report moe_vl --scale cluster --json

Writes ``report.html`` (self-contained), ``report.md`` and ``report.json`` into ``runs/<experiment>/<scale>/report/``.
report.json is the report; the page and the Markdown file are views of it. Estimate and interval of an INVALID endpoint
are withheld; each run's own value stays in report.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from analysis import plots, wording
from analysis.checks import Check
from analysis.load import FINISHED, NOT_STARTED, Experiment, LoadError, RunRecord, load_experiment
from analysis.matching import leaves, protocol
from analysis.plan import Endpoint, PlanError
from analysis.verdict import EndpointResult, Verdict, judge

SCHEMA_VERSION = 1
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


def report_data(experiment: Experiment, results: tuple[EndpointResult, ...]) -> dict[str, Any]:
    """The whole report as plain data (report.json): plan, accounting, endpoints with verdicts, checks, protocol."""
    plan = experiment.plan
    checks = {
        (result.measurement.candidate, check.name): check
        for result in results
        for check in result.measurement.checks
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "experiment": plan.experiment,
        "scale": plan.scale,
        "question": plan.question,
        "baseline": plan.baseline,
        "generated": datetime.now(UTC).isoformat(timespec="seconds"),
        "alpha": plan.alpha_per_look,
        "looks": plan.looks,
        "pairing_unit": plan.pairing_unit,
        "seeds": list(plan.seeds),
        "arms": [_arm(experiment, arm.name, arm.role) for arm in plan.arms],
        "endpoints": [_endpoint(experiment, result) for result in results],
        "checks": [_check(candidate, check) for (candidate, _), check in checks.items()],
        "protocol": _shared_protocol(experiment),
        "differences": _arm_settings(experiment),
        "runs": [_run(run) for run in (*experiment.runs, *experiment.beyond)],
        "plan": {
            "created": plan.created.isoformat(),
            "exclusion": plan.exclusion.model_dump(),
            "lost_run_rule": plan.lost_run_rule.model_dump(),
            "amendments": [amendment.model_dump(mode="json") for amendment in plan.amendments],
        },
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
        **shared, figures=_figures(experiment, results)
    )
    (target / "report.html").write_text(page)
    (target / "report.md").write_text(templates.get_template("report.md.j2").render(**shared))
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


def _arm(experiment: Experiment, name: str, role: str) -> dict[str, Any]:
    runs = experiment.of(name)
    return {
        "name": name,
        "role": role,
        "planned": len(runs),
        "started": sum(run.state != NOT_STARTED for run in runs),
        "finished": sum(run.state == FINISHED for run in runs),
        "lost": sum(run.state != FINISHED for run in runs),
        "retried": sum(run.attempts > 1 for run in runs),
        "beyond_plan": sum(run.system == name for run in experiment.beyond),
        "lost_runs": [
            {"seed": run.seed, "folder": run.folder, "reason": run.reason}
            for run in runs
            if run.state != FINISHED
        ],
    }


def _endpoint(experiment: Experiment, result: EndpointResult) -> dict[str, Any]:
    endpoint, decision, measured = result.endpoint, result.decision, result.measurement
    withheld = result.comparison is None or decision.verdict == Verdict.INVALID
    c = None if withheld else result.comparison
    needed = decision.needed
    return {
        "name": endpoint.name,
        "primary": endpoint.primary,
        "kind": endpoint.kind,
        "unit": endpoint.unit,
        "direction": endpoint.direction,
        "measured_as": _measured_as(endpoint),
        "scale": endpoint.scale,
        "margin": endpoint.margin,
        "margin_text": wording.margin(endpoint),
        "margin_reason": endpoint.margin_reason,
        "candidate": measured.candidate,
        "baseline": measured.baseline,
        "n": len(measured.values[measured.candidate]),
        "n_baseline": len(measured.values[measured.baseline]),
        "mean": c and c.mean,
        "mean_baseline": c and c.mean_baseline,
        "sd": c and c.sd,
        "sd_baseline": c and c.sd_baseline,
        "estimate": c and c.estimate,
        "ci_low": c and c.ci_low,
        "ci_high": c and c.ci_high,
        "level": 1 - experiment.plan.alpha_per_look,
        "tost_low": c and c.tost_low,
        "tost_high": c and c.tost_high,
        "estimate_text": wording.effect(endpoint, c.estimate) if c else "\u2013",
        "ci_text": wording.interval(endpoint, c.ci_low, c.ci_high) if c else "\u2013",
        "p_difference": c and c.p_difference,
        "p_difference_holm": c and result.p_holm,
        "p_equivalence": c and c.p_equivalence,
        "df": c and c.df,
        "verdict": decision.verdict.value,
        "headline": decision.headline,
        "detail": decision.detail,
        "reasons": list(decision.reasons),
        "cautions": list(result.cautions),
        "needed_n": needed and [needed.low, needed.high],
        "needed_n_estimate": needed and needed.estimate,
        "may_write": result.may_write,
        "may_not_write": result.may_not_write,
        "item_stderr": _item_stderr(experiment, result),
        "values": {arm: {str(s): v for s, v in by.items()} for arm, by in measured.values.items()},
    }


def _item_stderr(experiment: Experiment, result: EndpointResult) -> float | None:
    """Mean standard error over the items of one evaluation, where the records hold it; None for other endpoints."""
    field = result.endpoint.field
    if not isinstance(field, str) or result.endpoint.summary != "at_last_step":
        return None
    name = f"{field.removesuffix('_mean')}_stderr"
    runs = [run for arm in result.measurement.values for run in experiment.finished(arm)]
    recorded = [run.metrics[name].dropna() for run in runs if name in run.metrics]
    errors = [series.iloc[-1] for series in recorded if len(series)]
    return float(sum(errors) / len(errors)) if errors else None


def _measured_as(endpoint: Endpoint) -> str:
    texts = {
        "at_last_step": "at the last step",
        "final_window_mean": f"mean of the last {endpoint.window} records",
        "total_rate": "total over total, steady steps",
        "auc": "mean height of the curve",
    }
    return f"{endpoint.field}, {texts[endpoint.summary]}"


def _check(candidate: str, check: Check) -> dict[str, Any]:
    record = asdict(check) | {"candidate": candidate, "status": _status(check)}
    record["endpoints"] = list(check.endpoints)
    return record


def _status(check: Check) -> str:
    """passed, failed, flagged (shown only) or unverified."""
    if check.passed is None:
        return "unverified"
    if check.passed:
        return "passed"
    return "flagged" if check.effect == "flag" else "failed"


def _run(run: RunRecord) -> dict[str, Any]:
    times = run.metrics["time_unix"] if "time_unix" in run.metrics else None
    return {
        "folder": run.folder,
        "system": run.system,
        "seed": run.seed,
        "planned": run.planned,
        "state": run.state,
        "reason": run.reason,
        "attempts": run.attempts,
        "last_step": None if run.metrics.empty else int(run.metrics.index[-1]),
        "minutes": None if times is None else round(float(times.max() - times.min()) / 60, 1),
    }


def _shared_protocol(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """Section -> key -> value, of the leaves that every started run shares."""
    configs = [protocol(run.config) for run in experiment.runs if run.config]
    sections: dict[str, dict[str, Any]] = {}
    for key, value in (configs[0] if configs else {}).items():
        if all(key in other and other[key] == value for other in configs):
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name or section] = value
    return sections


def _arm_settings(experiment: Experiment) -> list[dict[str, Any]]:
    """What the arms do not share: one row a key, one value an arm (several where its runs disagree)."""
    rows: dict[str, dict[str, list[Any]]] = {}
    names = [arm.name for arm in experiment.plan.arms]
    for run in experiment.runs:
        own = {key: value for key, value in run.config.items() if key != "seed"}
        for key, value in leaves(own):
            seen = rows.setdefault(key, {}).setdefault(run.system, [])
            if value not in seen:
                seen.append(value)
    return [
        {"key": key, "values": {name: seen.get(name, []) for name in names}}
        for key, seen in rows.items()
        if len({json.dumps(seen.get(name), sort_keys=True) for name in names}) > 1
        or any(len(values) > 1 for values in seen.values())
    ]


def _figures(experiment: Experiment, results: tuple[EndpointResult, ...]) -> dict[str, Any]:
    return {
        "forest": plots.forest(results),
        "runs": plots.distributions(experiment, results),
        "curves": [figure for figure in _curve_figures(experiment) if figure],
        "parts": plots.step_parts(experiment),
        "mismatch": plots.mismatch_and_lag(experiment),
    }


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
