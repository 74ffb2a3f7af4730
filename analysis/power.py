"""How many runs a claim needs, before the money is spent, from an experiment's file and the spread of a pilot.

    python -m analysis.power                                            in units of the spread between runs
    python -m analysis.power experiments/moe_vl.yaml                    how small the spread must be for the margins to be shown
    python -m analysis.power experiments/moe_vl.yaml --pilot runs/moe_vl/tiny     with the spread that finished runs show

``submit`` prints the same sentences (``prospects``). The arithmetic is in ``sample_size.py``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from analysis.endpoint import Endpoint
from analysis.sample_size import (
    RUNS,
    TARGET_POWER,
    PilotSpread,
    PowerRow,
    needed_runs,
    non_inferiority_power,
    power_table,
    smallest_margin,
    tost_power,
)


def outlook(endpoint: Endpoint, n: int, pilot: PilotSpread | None, *, alpha: float = 0.05) -> str:
    """One sentence before the money is spent: what ``n`` runs a side can show of an endpoint."""
    ratio, one_sided = endpoint.scale == "ratio", endpoint.non_inferiority
    margin = math.log1p(endpoint.margin) if ratio else endpoint.margin

    def shown(value: float) -> str:
        return f"{math.expm1(value):.1%}" if ratio else f"{value:.2g} {endpoint.unit}"

    within = f"{endpoint.margin:.0%}" if ratio else f"{endpoint.margin:g} {endpoint.unit}"
    within = f"NON-INFERIOR within {within}" if one_sided else f"EQUIVALENT within ±{within}"
    if n < 3:
        return f"{endpoint.name}: {n} runs a side allow no inference; 3 is the least"
    if pilot is None:
        spread = margin / smallest_margin(n, 1.0, 1.0, one_sided=one_sided, alpha=alpha)
        return (
            f"{endpoint.name}: {n} runs a side can show {within} (power {TARGET_POWER:.0%}) where the spread between runs "
            f"is at most {shown(spread)}"
        )
    spreads = (pilot.sd, pilot.sd_baseline)
    power_of = non_inferiority_power if one_sided else tost_power
    power = power_of(n, *spreads, margin, alpha=alpha)
    least = smallest_margin(n, *spreads, one_sided=one_sided, alpha=alpha)
    needed = needed_runs(*spreads, pilot.df, margin, alpha=alpha, one_sided=one_sided)
    return (
        f"{endpoint.name}: with the pilot's spread ({pilot.candidate} {shown(pilot.sd)}, baseline "
        f"{shown(pilot.sd_baseline)}) {n} runs a side show {within} with power {power:.0%}; the smallest margin they can "
        f"show is {shown(least)}; the declared one takes n = {needed}"
    )


def prospects(
    endpoints: Sequence[Endpoint], n: int, folder: Path, *, alpha: float = 0.05
) -> list[str]:
    """``outlook`` of every endpoint, with the spread of the runs of ``folder`` that are finished already."""
    from analysis import pilot  # here: it reads runs, which most plans have none of yet

    spreads: dict[str, list[PilotSpread]] = {}
    said = []
    if any(folder.glob("*/done.json")) and (folder / "plan.json").is_file():
        try:
            spreads = pilot.spreads(endpoints, folder)
        except ValueError as error:
            said.append(f"no pilot: {error}")
    return said + [
        outlook(endpoint, n, spread, alpha=alpha)
        for endpoint in endpoints
        for spread in spreads.get(endpoint.name) or [None]
    ]


def render_power_table(rows: Sequence[PowerRow], unit: str = "run SD", title: str = "") -> Table:
    """A rich table of ``power_table``; unit "ratio" shows logarithms as percentages."""

    def show(value: float) -> str:
        return f"{math.expm1(value):.1%}" if unit == "ratio" else f"{value:.3g} {unit}"

    title = escape(title) or f"What n runs a side can show (power {TARGET_POWER:.1f})"
    table = Table(title=title, title_justify="left")
    table.add_column("runs a side", justify="right")
    table.add_column("smallest margin for EQUIVALENT", justify="right")
    table.add_column("smallest difference for DIFFERENT", justify="right")
    own = rows[0].power_margin is not None
    if own:
        table.add_column("power: EQUIVALENT within the margin", justify="right")
        table.add_column("power: DIFFERENT by the margin", justify="right")
    for row in rows:
        powers = [f"{row.power_margin:.0%}", f"{row.power_difference:.0%}"] if own else []
        table.add_row(str(row.n), show(row.smallest_margin), show(row.smallest_difference), *powers)
    return table


def main(arguments: list[str] | None = None) -> int:
    """Print what runs can show; returns 1 with one clear line where the experiment or the pilot cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.power", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("experiment", nargs="?", type=Path, help="an experiment's YAML file")
    parser.add_argument("--scale", help="which scale's seeds (default: the experiment's own)")
    parser.add_argument("--pilot", type=Path, help="a folder with plan.json and finished runs")
    parser.add_argument("--runs", type=int, nargs="+", default=list(RUNS), help="n of the table")
    options = parser.parse_args(arguments)
    console = Console()
    from analysis import pilot  # here: a submit prints ``outlook`` without reading runs

    try:
        if options.experiment is None and options.pilot is None:
            console.print(render_power_table(power_table(options.runs)))
            return 0
        declared = pilot.declared(options.experiment, options.scale, options.pilot)
        spreads = pilot.spreads(declared.endpoints, options.pilot) if options.pilot else {}
        for endpoint in declared.endpoints:
            for spread in spreads.get(endpoint.name) or [None]:
                text = outlook(endpoint, len(declared.seeds), spread, alpha=declared.alpha)
                console.print(Text(text), soft_wrap=True)
                if spread is not None:
                    ratio = endpoint.scale == "ratio"
                    margin = math.log1p(endpoint.margin) if ratio else endpoint.margin
                    rows = power_table(
                        options.runs,
                        spread.sd,
                        spread.sd_baseline,
                        margin=margin,
                        alpha=declared.alpha,
                    )
                    unit = "ratio" if ratio else endpoint.unit
                    console.print(render_power_table(rows, unit, endpoint.name))
        if not spreads:
            console.print(render_power_table(power_table(options.runs, alpha=declared.alpha)))
    except ValueError as error:
        print(f"analysis.power: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
