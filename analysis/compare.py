"""Compare numbers that are already there: one number a run in a table, or published mean, SD and n.

    python -m analysis.compare runs.csv --by system --baseline megatron --margin 10%
    python -m analysis.compare runs.csv --baseline megatron --margin 10% --pair-by seed
    python -m analysis.compare --summary molt:119.4,2.3,3 --summary slime:109.5,10.3,3 --baseline slime --margin 10%

A table is a CSV, a JSON list of objects, or a JSON object of arm -> list of numbers. The same intervals and the same five
verdicts as the report, without its checks: nothing here knows whether the numbers are valid, and the output says so.
From Python: ``analysis.compare(ours, baseline, margin=0.1, scale="ratio", direction="lower")``.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text
from statsmodels.stats.multitest import multipletests

from analysis import calibration, wording
from analysis.endpoint import Endpoint
from analysis.given import Given, InputError, from_summaries, from_table, parse_margin
from analysis.inference import Comparison, NoInference, compare_samples, refused_comparison
from analysis.plan import MOST_ALPHA
from analysis.sample_size import tost_power
from analysis.verdict import decide

UNCHECKED = "validity was not checked: whether the runs trained, and under one protocol, is not in these numbers"
NUMBERS = (
    "paired", "correlation", "mean", "mean_baseline", "sd", "sd_baseline", "estimate", "estimate_relative", "ci_low",
    "ci_high", "level", "tost_low", "tost_high", "t", "df", "p_difference", "p_difference_holm", "p_equivalence",
    "p_permutation", "power_equivalence",
)  # fmt: skip
"""Keys that are null where no inference is made."""
FROM_DATA = "the margin was estimated from data: a share of the observed baseline mean"


def compare(
    a: Sequence[float],
    b: Sequence[float],
    *,
    margin: float,
    scale: Literal["absolute", "ratio"] = "absolute",
    direction: Literal["higher", "lower"] | None = None,
    paired: bool = False,
    level: float = 0.95,
) -> Comparison:
    """One number a run of an arm ``a`` against the baseline ``b``; ``str()`` of the result reads as a sentence.

    margin: the largest difference that does not matter, in the unit, or relative for scale ratio. direction: which way
    is better; without it a difference is higher or lower. paired: a[i] and b[i] share a declared unit.
    Numbers that allow no inference (fewer than 3, not finite, all equal) give a Comparison whose ``refused`` says why and
    whose verdict is INCONCLUSIVE or INVALID. Raises ValueError for a margin or level that is none, or unequal pairs.
    """
    if not 1 - MOST_ALPHA <= level < 1:
        raise ValueError(
            f"level is {level}; a verdict asks for {1 - MOST_ALPHA:g} or more, and less than 1"
        )
    if scale not in ("absolute", "ratio"):
        raise ValueError(f"scale is {scale!r}; write absolute or ratio")
    if direction not in (None, "higher", "lower"):
        raise ValueError(f"direction is {direction!r}; write higher, lower or None")
    alpha = 1 - level
    try:
        return compare_samples(
            a, b, margin=margin, scale=scale, alpha=alpha, paired=paired, permutation=True,
            direction=direction,
        )  # fmt: skip
    except NoInference as error:
        return refused_comparison(a, b, margin=margin, scale=scale, alpha=alpha, why=str(error))


def judge_samples(
    given: Given,
    baseline: str,
    *,
    margin: float,
    relative: bool,
    summarised: bool,
    direction: str | None = None,
    paired: bool = False,
) -> list[dict[str, Any]]:
    """One record a candidate, with the keys of report.json; Holm over the candidates. Raises InputError."""
    samples = given.samples
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
    mean = sum(samples[baseline]) / len(samples[baseline])
    found = {
        arm: replace(
            compare(
                samples[arm],
                samples[baseline],
                margin=margin * abs(mean) if from_data else margin,
                scale=scale,
                direction=direction,
                paired=paired,
            ),
            margin_from_data=from_data,
            **({"p_permutation": None} if summarised else {}),
        )
        for arm in samples
        if arm != baseline
    }
    family = [1.0 if c.refused else c.p_difference for c in found.values()]
    adjusted = multipletests(family, method="holm")[1]
    return [
        _record(arm, baseline, given, comparison, float(p), summarised)
        for (arm, comparison), p in zip(found.items(), adjusted)
    ]


def _record(
    arm: str,
    baseline: str,
    given: Given,
    comparison: Comparison,
    p_adjusted: float,
    summarised: bool,
) -> dict[str, Any]:
    needed = comparison.needed
    common = {
        "name": given.name,
        "unit": "",
        "direction": comparison.direction,
        "candidate": arm,
        "baseline": baseline,
        "n": comparison.n,
        "n_baseline": comparison.n_baseline,
        "scale": comparison.scale,
        "margin": comparison.margin,
        "margin_from_data": comparison.margin_from_data,
    }
    if comparison.refused:
        return {
            **common,
            **dict.fromkeys(NUMBERS),
            "verdict": comparison.verdict.value,
            "detail": "needs n = 3 or more a side" if needed else "no usable number",
            "reasons": [comparison.refused],
            "cautions": [UNCHECKED, *given.notes],
            "needed_n": needed and [needed.low, needed.high],
            "needed_n_estimate": None,
        }
    endpoint = Endpoint(
        name=given.name, field=given.name, summary="at_last_step", unit="", direction=comparison.direction or "higher",
        scale=comparison.scale, margin=comparison.margin, margin_reason="given on the command line",
    )  # fmt: skip
    decision = decide(endpoint, comparison, p_adjusted=p_adjusted)
    cautions = [UNCHECKED, *given.notes, *([FROM_DATA] if comparison.margin_from_data else [])]
    if not summarised:
        both = (given.samples[arm], given.samples[baseline])
        cautions += calibration.warnings(comparison, both, decision.verdict)
    power = tost_power(
        min(comparison.n, comparison.n_baseline),
        *comparison.tested_spreads,
        comparison.tested_margin,
    )
    return {
        **common,
        **{key: getattr(comparison, key) for key in NUMBERS if hasattr(comparison, key)},
        "estimate_relative": comparison.relative,
        "p_difference_holm": p_adjusted,
        "power_equivalence": power,
        "verdict": decision.verdict.value,
        "detail": decision.detail if comparison.direction else _without_direction(decision.detail),
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
    head = Text(record["verdict"], style="bold")
    head.append(
        f" {record.get('detail', '')}   {record['candidate']} against {record['baseline']}, {record['name']}",
        style="not bold",
    )
    console.print(head, soft_wrap=True)
    if record["estimate"] is not None:
        level, relative = record["level"], record["estimate_relative"]
        share = "" if relative is None else f" ({relative:+.1%})"
        test = (
            f"paired t (correlation {record['correlation']:.2f})" if record["paired"] else "Welch"
        )
        exact = record["p_permutation"]
        line = (
            f"  {'ratio' if record['scale'] == 'ratio' else 'difference'} {wording.number(record['estimate'])}"
            f"{share}, {level:.0%} CI [{wording.number(record['ci_low'])}, "
            f"{wording.number(record['ci_high'])}], {test} {wording.probability(record['p_difference'])}"
            f"{'' if exact is None else f', exact permutation {wording.probability(exact)}'}; "
            f"{2 * level - 1:.0%} CI [{wording.number(record['tost_low'])}, {wording.number(record['tost_high'])}], "
            f"TOST {wording.probability(record['p_equivalence'])}; power {record['power_equivalence']:.0%}"
        )
        console.print(Text(line), soft_wrap=True)
    for text in (*record["reasons"], *record.get("cautions", ())):
        console.print(Text(f"  - {text}"), soft_wrap=True)


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
    parser.add_argument("--pair-by", metavar="COLUMN", help="column that holds the pairing unit")
    parser.add_argument("--direction", choices=("higher", "lower"), help="which way is better")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if (options.table is None) == (not options.summary):
            raise InputError("give either a table or --summary NAME:MEAN,SD,N for each arm")
        margin, relative = parse_margin(options.margin)
        if options.summary:
            given = from_summaries(options.summary)
        else:
            given = from_table(options.table, options.by, options.value, options.pair_by)
        records = judge_samples(
            given, options.baseline, margin=margin, relative=relative,
            summarised=bool(options.summary), direction=options.direction,
            paired=options.pair_by is not None and not options.summary,
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
