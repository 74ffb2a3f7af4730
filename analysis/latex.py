r"""The report's tables for a paper, in LaTeX: ``\usepackage{booktabs}``, then ``\input{report.tex}``.

Every string that came from an experiment is escaped; numbers are set as the page sets them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from analysis import wording

SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "[": "{[}", "]": "{]}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "\u2212": "$-$", "\u00b1": r"$\pm$", "\u202f": r"\,", "\u2013": "--", "\u2265": r"$\geq$",
    "\u2264": r"$\leq$", "\u00d7": r"$\times$", "\u2248": r"$\approx$", "\n": " ",
}  # fmt: skip


def escape(text: Any) -> str:
    """Plain text as LaTeX text."""
    return "".join(SPECIAL.get(character, character) for character in str(text))


def table(caption: str, label: str, alignment: str, rows: Sequence[Sequence[Any]]) -> str:
    """A booktabs table; the first row is its head. Cells are escaped here."""
    head, *body = [" & ".join(escape(cell) for cell in row) + r" \\" for row in rows]
    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{escape(caption)}}}",
            rf"  \label{{tab:{re.sub(r'[^a-z0-9]+', '-', label.lower())}}}",
            rf"  \begin{{tabular}}{{{alignment}}}",
            r"    \toprule",
            f"    {head}",
            r"    \midrule",
            *(f"    {row}" for row in body),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def report_tables(report: dict[str, Any]) -> str:
    """Verdicts, run accounting and, where there is one, the noise floor of report.json."""
    level = f"{100 - 100 * report['alpha']:g} % interval"
    verdicts: list[Sequence[Any]] = [
        ["Endpoint", report["baseline"], "Candidate", "Difference", level, "Margin", "n", "Verdict"]
    ]
    for e in report["endpoints"]:
        verdicts.append(
            [
                f"{e['name']}{' *' if e['primary'] else ''} [{e['unit']}]",
                _value(e["mean_baseline"], e["sd_baseline"]),
                f"{e['candidate']} {_value(e['mean'], e['sd'])}",
                e["estimate_text"],
                e["ci_text"],
                e["margin_text"],
                e["n"] if e["n"] == e["n_baseline"] else f"{e['n']}, {e['n_baseline']}",
                e["verdict"],
            ]
        )
    caption = (
        f"{report['question'].strip()} Mean (sd) over runs; differences read candidate minus {report['baseline']}, "
        "relative ones are ratios of geometric means; * primary. All runs start from one checkpoint."
    )
    parts = [table(caption, f"{report['experiment']} verdicts", "lrrrrrrl", verdicts)]
    accounting: list[Sequence[Any]] = [
        ["Arm", "Planned", "Started", "Finished", "Lost", "Success rate, 95 % interval", "Retried"]
    ]
    for arm in report["arms"]:
        rate = "\u2013" if arm["success_rate"] is None else f"{arm['success_rate']:.0%}"
        accounting.append(
            [
                arm["name"],
                arm["planned"],
                arm["started"],
                arm["finished"],
                arm["lost"],
                f"{rate} [{arm['success_low']:.0%}, {arm['success_high']:.0%}]",
                arm["retried"],
            ]  # fmt: skip
        )
    parts.append(table("Runs of each arm.", f"{report['experiment']} runs", "lrrrrrr", accounting))
    floors = [f for f in report["noise_floor"] if f["control"] or f["same_seed_sd"] is not None]
    if floors:
        rows: list[Sequence[Any]] = [["Endpoint", "Learning rate zero", "Same-seed sd"]]
        for floor in floors:
            rows.append(
                [
                    f"{floor['name']} [{floor['unit']}]",
                    _value(floor["control_mean"], None),
                    _value(floor["same_seed_sd"], None),
                ]
            )
        parts.append(table("Noise floor.", f"{report['experiment']} noise floor", "lrr", rows))
    return "\n".join(parts)


def _value(mean: float | None, sd: float | None) -> str:
    if mean is None:
        return "\u2013"
    return wording.number(mean) + ("" if sd is None else f" ({wording.number(sd, 2)})")
