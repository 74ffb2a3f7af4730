"""LaTeX tables: what is special is escaped, and the rows are those of report.json."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from analysis.latex import escape, report_tables, table
from analysis.report import write_report
from tests.analysis.synthetic import ACCURACY, write_experiment


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("50 % of a_b & c", r"50 \% of a\_b \& c"),
        (r"\input{x}", r"\textbackslash{}input\{x\}"),
        ("−0.004 ±0.03", r"$-$0.004 $\pm$0.03"),
        ("[1, 2]", "{[}1, 2{]}"),
        ("a\nb", "a b"),
        ("tok·s⁻¹", r"tok$\cdot$s\textsuperscript{$-$}\textsuperscript{1}"),
        ("µs, α, Δ, Α, λ₂", r"$\mu$s, $\alpha$, $\Delta$, A, $\lambda$\textsubscript{2}"),
        ("Müller, naïve, Ångström", r"M\"{u}ller, na\"{i}ve, \r{A}ngstr\"{o}m"),
        ("ﬁnal ½", r"final 1/2"),
        ("中", "(U+4E2D)"),
        ("\x07bell", "bell"),
    ],
)
def test_special_characters_are_escaped(text, latex):
    assert escape(text) == latex


def test_a_table_is_booktabs_with_its_head_first():
    text = table("A caption.", "My Label!", "lr", [["name", "n"], ["x", 3]])
    lines = [line.strip() for line in text.splitlines()]
    assert lines[4:10] == [
        r"\begin{tabular}{lr}", r"\toprule", r"name & n \\", r"\midrule", r"x & 3 \\", r"\bottomrule",
    ]  # fmt: skip
    assert r"\label{tab:my-label-}" in text


def test_every_row_has_as_many_cells_as_its_table_has_columns(tmp_path):
    odd = ACCURACY.model_copy(update={"name": "pass & fail_rate {x}"})
    report = write_report(write_experiment(tmp_path, steps=20, endpoints=(odd,), repeats=1))
    for part in report_tables(report).split(r"\begin{tabular}")[1:]:
        columns = len(re.match(r"\{(\w+)\}", part)[1])
        rows = [line for line in part.splitlines() if line.endswith(r"\\")]
        assert len(rows) >= 2
        assert {len(re.split(r"(?<!\\)&", row)) for row in rows} == {columns}


def test_the_report_writes_its_tables(tmp_path):
    folder = write_experiment(tmp_path, steps=20)
    write_report(folder)
    text = (folder / "report" / "report.tex").read_text()
    assert text.count(r"\begin{table}") == 3 and "EQUIVALENT" in text


@pytest.mark.skipif(
    shutil.which("pdflatex") is None and "CI" not in os.environ, reason="pdflatex is not installed"
)
def test_pdflatex_sets_a_report_whose_names_are_not_ascii(tmp_path):
    odd = ACCURACY.model_copy(update={"name": "α→β µ 中 naïve", "unit": "tok·s⁻¹"})
    folder = write_experiment(tmp_path / "runs", steps=20, endpoints=(odd,))
    write_report(folder)
    tables = (folder / "report" / "report.tex").read_text()
    assert tables.isascii()
    head = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n"
    (tmp_path / "paper.tex").write_text(f"{head}{tables}\n\\end{{document}}\n")
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "paper.tex"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout[-2000:]
