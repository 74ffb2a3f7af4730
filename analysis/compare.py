"""Compare numbers that are already there: one number a run in a table, or published mean, SD and n.

    python -m analysis.compare runs.csv --by system --baseline megatron --margin 10%
    python -m analysis.compare --summary molt:119.4,2.3,3 --summary slime:109.5,10.3,3 --baseline slime --margin 10%

The same intervals and the same five verdicts as the report, without its checks: nothing here knows whether the numbers
are valid, and the output says so. From Python: ``analysis.compare(ours, baseline, margin=0.1, scale="ratio")``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from rich.console import Console
from statsmodels.stats.multitest import multipletests

from analysis import wording
from analysis.inference import Comparison, NoInference, compare_samples, stand_in_sample
from analysis.plan import Endpoint
from analysis.power import tost_power
from analysis.verdict import Verdict, decide

UNCHECKED = "validity was not checked: whether the runs trained, and under one protocol, is not in these numbers"
FROM_DATA = "the margin was estimated from data: a share of the observed baseline mean"


class InputError(ValueError):
    """Numbers or options that cannot be compared; the message says what to change."""


def compare(
    a: Sequence[float],
    b: Sequence[float],
    *,
    margin: float,
    scale: Literal["absolute", "ratio"] = "absolute",
    level: float = 0.95,
) -> Comparison:
    """One number a run of an arm ``a`` against the baseline ``b``. Raises NoInference where no interval may be made."""
    return compare_samples(a, b, margin=margin, scale=scale, alpha=1 - level)


def from_summaries(text: Sequence[str]) -> dict[str, list[float]]:
    """``name:mean,sd,n`` -> name -> a sample with exactly these. Raises InputError."""
    samples = {}
    for item in text:
        name, _, numbers = item.partition(":")
        if name in samples:
            raise InputError(
                f"--summary {item}: {name} is given twice; each arm needs its own name"
            )
        try:
            mean, sd, n = numbers.split(",")
            samples[name] = list(stand_in_sample(float(mean), float(sd), int(n)))
        except (ValueError, NoInference) as error:
            raise InputError(f"--summary {item}: write NAME:MEAN,SD,N ({error})") from error
    return samples


def from_table(path: Path, by: str, value: str | None) -> tuple[str, dict[str, list[float]]]:
    """(value column, arm -> values) of a CSV, or a JSON list of objects. Raises InputError."""
    try:
        table = pd.read_json(path) if path.suffix == ".json" else pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a table: {error}") from error
    numeric = [
        c for c in table.select_dtypes("number").columns if c not in (by, "seed", "run", "step")
    ]
    if by not in table:
        raise InputError(f"{path}: no column {by}; --by takes one of {', '.join(table.columns)}")
    if value is None and len(numeric) != 1:
        raise InputError(f"{path}: say which number to compare: --value {' or '.join(numeric)}")
    column = value or numeric[0]
    if column not in table:
        raise InputError(f"{path}: no column {column}; --value takes one of {', '.join(numeric)}")
    return column, {str(arm): list(rows[column]) for arm, rows in table.groupby(by, sort=False)}


def parse_margin(text: str) -> tuple[float, bool]:
    """ "10%" -> (0.1, relative); "0.03" -> (0.03, absolute). Raises InputError."""
    relative = text.endswith("%")
    try:
        margin = float(text.removesuffix("%")) / (100 if relative else 1)
    except ValueError as error:
        raise InputError(f"--margin {text}: write 10% or a number in the unit") from error
    if not (margin > 0 and math.isfinite(margin)):
        raise InputError(f"--margin {text}: a margin is positive")
    return margin, relative


def judge_samples(
    samples: Mapping[str, Sequence[float]],
    baseline: str,
    *,
    name: str,
    margin: float,
    relative: bool,
    summarised: bool,
    direction: str | None = None,
) -> list[dict[str, Any]]:
    """One record a candidate, with the keys of report.json; Holm over the candidates. Raises InputError."""
    if baseline not in samples or len(samples) < 2:
        raise InputError(
            f"--baseline {baseline}: the arms are {', '.join(samples) or 'none'}; two are needed"
        )
    from_data = relative and summarised
    scale = "ratio" if relative and not summarised else "absolute"
    if from_data and sum(samples[baseline]) == 0:
        raise InputError(
            f"--margin {margin:.0%}: the mean of {baseline} is 0 and has no share; give the margin in the unit"
        )
    found: dict[str, Comparison | str] = {}
    for arm in samples:
        if arm == baseline:
            continue
        mean = sum(samples[baseline]) / len(samples[baseline])
        width = margin * abs(mean) if from_data else margin
        try:
            found[arm] = replace(
                compare_samples(samples[arm], samples[baseline], margin=width, scale=scale),
                margin_from_data=from_data,
            )
        except NoInference as error:
            found[arm] = str(error)
    family = [c.p_difference if isinstance(c, Comparison) else 1.0 for c in found.values()]
    adjusted = multipletests(family, method="holm")[1]
    return [
        _record(
            arm,
            baseline,
            name,
            direction,
            comparison,
            float(p),
            [len(samples[arm]), len(samples[baseline])],
        )
        for (arm, comparison), p in zip(found.items(), adjusted)
    ]


def _record(
    arm: str,
    baseline: str,
    name: str,
    direction: str | None,
    comparison: Comparison | str,
    p_adjusted: float,
    counts: list[int],
) -> dict[str, Any]:
    common = {"name": name, "direction": direction, "candidate": arm, "baseline": baseline}
    sizes = {"n": counts[0], "n_baseline": counts[1]}
    if isinstance(comparison, str):
        few = min(counts) < 3
        verdict = Verdict.INCONCLUSIVE if few else Verdict.INVALID
        return {
            **common,
            **sizes,
            "verdict": verdict.value,
            "reasons": [comparison],
            "needed_n": [3, None] if few else None,
        }
    endpoint = Endpoint(
        name=name, field=name, summary="at_last_step", unit="", direction=direction or "higher", scale=comparison.scale,
        margin=comparison.margin, margin_reason="given on the command line",
    )  # fmt: skip
    decision = decide(endpoint, comparison, p_adjusted=p_adjusted)
    cautions = [UNCHECKED] + ([FROM_DATA] if comparison.margin_from_data else [])
    relative = (
        comparison.estimate - 1
        if comparison.scale == "ratio"
        else comparison.estimate / abs(comparison.mean_baseline)
        if comparison.mean_baseline
        else None
    )
    power = tost_power(
        min(counts), comparison.spread, comparison.spread_baseline, comparison.tested_margin
    )
    return {
        **common,
        **sizes,
        "scale": comparison.scale,
        "margin": comparison.margin,
        "margin_from_data": comparison.margin_from_data,
        "mean": comparison.mean,
        "mean_baseline": comparison.mean_baseline,
        "estimate": comparison.estimate,
        "estimate_relative": relative,
        "ci_low": comparison.ci_low,
        "ci_high": comparison.ci_high,
        "level": comparison.level,
        "tost_low": comparison.tost_low,
        "tost_high": comparison.tost_high,
        "t": comparison.t,
        "df": comparison.df,
        "p_difference": comparison.p_difference,
        "p_difference_holm": p_adjusted,
        "p_equivalence": comparison.p_equivalence,
        "power_equivalence": power,
        "verdict": decision.verdict.value,
        "detail": _without_direction(decision.detail) if direction is None else decision.detail,
        "reasons": list(decision.reasons),
        "cautions": cautions,
        "needed_n": decision.needed and [decision.needed.low, decision.needed.high],
        "needed_n_estimate": decision.needed and decision.needed.estimate,
    }


def _without_direction(detail: str) -> str:
    """Where nobody said which way is better, a difference is higher or lower."""
    for judged, plain in (("better", "higher"), ("worse", "lower")):
        detail = plain + detail.removeprefix(judged) if detail.startswith(judged) else detail
    return detail


def _print(record: Mapping[str, Any], console: Console) -> None:
    console.print(
        f"[bold]{record['verdict']}[/bold] {record.get('detail', '')}   "
        f"{record['candidate']} against {record['baseline']}, {record['name']}"
    )
    if "estimate" in record:
        level, relative = record["level"], record["estimate_relative"]
        share = "" if relative is None else f" ({relative:+.1%})"
        console.print(
            f"  {'ratio' if record['scale'] == 'ratio' else 'difference'} {wording.number(record['estimate'])}"
            f"{share}, {level:.0%} CI [{wording.number(record['ci_low'])}, "
            f"{wording.number(record['ci_high'])}], Welch {wording.probability(record['p_difference'])}; "
            f"{2 * level - 1:.0%} CI [{wording.number(record['tost_low'])}, {wording.number(record['tost_high'])}], "
            f"TOST {wording.probability(record['p_equivalence'])}; power {record['power_equivalence']:.0%}",
            soft_wrap=True,
            highlight=False,
        )  # fmt: skip
    for text in (*record["reasons"], *record.get("cautions", ())):
        console.print(f"  - {text}", soft_wrap=True, highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Print verdicts; returns 1 with one clear line where the input cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.compare", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("table", nargs="?", type=Path, help="CSV or JSON with one row a run")
    parser.add_argument("--by", default="system", help="column that names the arm")
    parser.add_argument("--value", help="column that holds the number")
    parser.add_argument("--summary", action="append", default=[], metavar="NAME:MEAN,SD,N")
    parser.add_argument("--baseline", required=True)
    parser.add_argument("--margin", required=True, help="10%% (relative) or a number in the unit")
    parser.add_argument("--direction", choices=("higher", "lower"), help="which way is better")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if (options.table is None) == (not options.summary):
            raise InputError("give either a table or --summary NAME:MEAN,SD,N for each arm")
        margin, relative = parse_margin(options.margin)
        if options.summary:
            name, samples = "value", from_summaries(options.summary)
        else:
            name, samples = from_table(options.table, options.by, options.value)
        records = judge_samples(
            samples, options.baseline, name=name, margin=margin, relative=relative,
            summarised=bool(options.summary), direction=options.direction,
        )  # fmt: skip
    except InputError as error:
        print(f"analysis.compare: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"schema_version": 1, "endpoints": records}, indent=2, allow_nan=False))
    else:
        for record in records:
            _print(record, Console())
    return 0


class _CallableModule(types.ModuleType):
    """``python -m analysis.compare`` and ``analysis.compare(a, b, margin=...)`` are one name: the module is callable."""

    def __call__(self, *arguments: Any, **options: Any) -> Comparison:
        return compare(*arguments, **options)


if __name__ == "__main__":
    sys.exit(main())
sys.modules[__name__].__class__ = _CallableModule
