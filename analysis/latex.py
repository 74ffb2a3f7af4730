r"""The report's tables for a paper, in LaTeX: ``\usepackage{booktabs}``, then ``\input{report.tex}``.

Every string that came from an experiment is escaped, into ASCII, so that pdflatex sets what lualatex does; numbers are set
as the page sets them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from analysis import wording

SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "[": "{[}", "]": "{]}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "\u2212": "$-$", "\u00b1": r"$\pm$", "\u202f": r"\,", "\u2013": "--", "\u2265": r"$\geq$",
    "\u2264": r"$\leq$", "\u00d7": r"$\times$", "\u2248": r"$\approx$", "\u2260": r"$\neq$", "\u221e": r"$\infty$",
    "\u2192": r"$\rightarrow$", "\u2190": r"$\leftarrow$", "\u00b7": r"$\cdot$", "\u22c5": r"$\cdot$", "\u00b0": r"$^\circ$",
    "\u2014": "---", "\u2018": "`", "\u2019": "'", "\u201c": "``", "\u201d": "\'\'", "\u2026": r"\ldots{}", "\u2044": "/",
    "\u00df": r"\ss{}", "\u00f8": r"\o{}", "\u00d8": r"\O{}", "\u00e6": r"\ae{}", "\u00c6": r"\AE{}", "\u0142": r"\l{}",
    "\u0141": r"\L{}", "\n": " ", "\t": " ",
}  # fmt: skip
ACCENTS = {
    "\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0304": "=", "\u0306": "u", "\u0307": ".", "\u0308": '"',
    "\u030a": "r", "\u030b": "H", "\u030c": "v", "\u0327": "c",
}  # fmt: skip
"""Combining marks and the macro that sets them over a letter."""
GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi omega"
).split()
"""Small letters that have a macro; of the capitals, those that no Latin letter looks like have one."""
LATIN_CAPITALS = dict(
    zip(
        "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a7",
        "ABEZHIKMNOPTX",
    )
)


def escape(text: Any) -> str:
    """Plain text as LaTeX text in ASCII. A character that LaTeX has no sign for becomes its number: (U+4E2D)."""
    return "".join(map(_character, unicodedata.normalize("NFC", str(text))))


def _character(character: str) -> str:
    if character in SPECIAL:
        return SPECIAL[character]
    if character.isascii():
        return character if character.isprintable() else ""
    if character in LATIN_CAPITALS:
        return LATIN_CAPITALS[character]
    kind, _, rest = unicodedata.decomposition(character).rpartition("> ")
    parts = [chr(int(code, 16)) for code in rest.split()]
    if kind in ("<super", "<sub") and parts:
        return rf"\text{kind[1:]}script{{{''.join(map(_character, parts))}}}"
    if kind:
        return "".join(map(_character, parts))
    if len(parts) == 2 and parts[1] in ACCENTS and parts[0].isascii():
        return rf"\{ACCENTS[parts[1]]}{{{parts[0]}}}"
    name = re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (\w+)", unicodedata.name(character, ""))
    letter = name and name[2].lower().replace("lamda", "lambda")
    if name and letter in GREEK:
        return rf"$\{letter if name[1] == 'SMALL' else letter.title()}$"
    return f"(U+{ord(character):04X})"


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
