"""Numbers that are already there: published summaries, tables of one number a run, and input that cannot be compared."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import analysis
from analysis.compare import main
from analysis.inference import NoInference

PUBLISHED = [
    "--summary",
    "molt:119.4,2.3,3",
    "--summary",
    "slime:109.5,10.3,3",
    "--baseline",
    "slime",
]


def records(capsys, *arguments: str) -> list[dict]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["endpoints"]


def write_table(tmp_path, rows: str):
    path = tmp_path / "runs.csv"
    path.write_text("system,seed,seconds\n" + rows)
    return str(path)


def test_the_published_table_is_inconclusive_at_ten_percent(capsys):
    (record,) = records(capsys, *PUBLISHED, "--margin", "10%")
    assert record["verdict"] == "INCONCLUSIVE"
    assert record["estimate_relative"] == pytest.approx(0.090, abs=5e-4)
    assert record["p_difference"] == pytest.approx(0.23, abs=0.005)
    assert record["p_equivalence"] == pytest.approx(0.44, abs=0.005)
    assert record["power_equivalence"] == pytest.approx(0.16, abs=0.005)
    assert record["needed_n_estimate"] == 10
    assert any("estimated from data" in caution for caution in record["cautions"])


def test_the_published_table_is_equivalent_at_a_quarter(capsys):
    (record,) = records(capsys, *PUBLISHED, "--margin", "25%")
    assert record["verdict"] == "EQUIVALENT"


def test_a_table_is_compared_as_a_ratio_where_the_margin_is_relative(tmp_path, capsys):
    rows = "molt,0,2.0\nmolt,1,2.1\nmolt,2,1.9\nmegatron,0,1.0\nmegatron,1,1.02\nmegatron,2,0.98\n"
    (record,) = records(
        capsys, write_table(tmp_path, rows), "--baseline", "megatron", "--margin", "10%", "--direction", "lower"
    )  # fmt: skip
    assert record["scale"] == "ratio" and record["margin_from_data"] is False
    assert record["estimate"] == pytest.approx(2.0, abs=0.01)
    assert record["detail"].startswith("worse")


def test_without_a_direction_a_difference_is_higher_or_lower(tmp_path, capsys):
    rows = "a,0,2.0\na,1,2.1\na,2,1.9\nb,0,1.0\nb,1,1.02\nb,2,0.98\n"
    (record,) = records(capsys, write_table(tmp_path, rows), "--baseline", "b", "--margin", "0.1")
    assert record["detail"].startswith("higher")


def test_holm_over_several_candidates_by_hand(tmp_path, capsys):
    rows = "".join(
        f"{arm},{seed},{value}\n"
        for arm, values in {
            "a": (1.0, 1.2, 1.1),
            "b": (1.3, 1.5, 1.4),
            "base": (1.0, 1.1, 1.05),
        }.items()
        for seed, value in enumerate(values)
    )
    first, second = records(
        capsys, write_table(tmp_path, rows), "--baseline", "base", "--margin", "0.1"
    )
    low, high = sorted((first["p_difference"], second["p_difference"]))
    by_hand = {low: 2 * low, high: max(high, 2 * low)}
    assert [r["p_difference_holm"] for r in (first, second)] == pytest.approx(
        [by_hand[r["p_difference"]] for r in (first, second)]
    )


@pytest.mark.parametrize(
    ("rows", "verdict", "reason"),
    [
        ("a,0,1\na,1,2\nb,0,1\nb,1,2\n", "INCONCLUSIVE", "fewer than 3 runs"),
        ("a,0,1\na,1,1\na,2,1\nb,0,1\nb,1,2\nb,2,3\n", "INVALID", "all 3 values are 1"),
        ("a,0,1\na,1,nan\na,2,1.5\nb,0,1\nb,1,2\nb,2,3\n", "INVALID", "not finite"),
        ("a,0,1\na,1,inf\na,2,1.5\nb,0,1\nb,1,2\nb,2,3\n", "INVALID", "not finite"),
    ],
)
def test_numbers_that_allow_no_interval(tmp_path, capsys, rows, verdict, reason):
    (record,) = records(capsys, write_table(tmp_path, rows), "--baseline", "b", "--margin", "0.1")
    assert record["verdict"] == verdict and reason in record["reasons"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--baseline", "b", "--margin", "10%"], "either a table or --summary"),
        ([*PUBLISHED[:-1], "verl", "--margin", "10%"], "the arms are molt, slime"),
        ([*PUBLISHED, "--margin", "ten"], "write 10%"),
        ([*PUBLISHED, "--margin", "0"], "a margin is positive"),
        (["--summary", "molt:1,2", "--baseline", "b", "--margin", "1"], "NAME:MEAN,SD,N"),
        (
            ["--summary", "a:1,1,3", "--summary", "a:2,1,3", "--baseline", "a", "--margin", "1"],
            "a is given twice",
        ),
        (
            ["--summary", "a:1,1,3", "--summary", "b:0,1,3", "--baseline", "b", "--margin", "10%"],
            "the mean of b is 0",
        ),
        (["nothing.csv", "--baseline", "b", "--margin", "1"], "cannot be read"),
    ],
)
def test_input_that_cannot_be_compared_is_one_clear_line(capsys, arguments, message):
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_baseline_of_mean_zero_has_no_relative_difference(capsys):
    arguments = ["--summary", "a:1,1,3", "--summary", "b:0,1,3", "--baseline", "b", "--margin", "5"]
    (record,) = records(capsys, *arguments)
    assert record["estimate_relative"] is None and record["estimate"] == pytest.approx(1.0)
    assert main(arguments) == 0
    assert "difference 1, 95% CI" in capsys.readouterr().out


def test_from_python_the_module_is_the_function():
    comparison = analysis.compare(
        [1.0, 1.1, 1.2], [1.0, 1.05, 1.1], margin=0.1, scale="ratio", level=0.9
    )
    assert comparison.level == pytest.approx(0.9)
    assert str(comparison).startswith("ratio 1.046, 90% CI")
    with pytest.raises(NoInference):
        analysis.compare([1.0, 2.0], [1.0, 2.0], margin=0.1)


def test_reading_a_plan_does_not_load_the_statistics():
    code = "import sys, analysis.plan; print('scipy' in sys.modules, 'matplotlib' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "False"]
