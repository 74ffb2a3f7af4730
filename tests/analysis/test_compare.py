"""Numbers that are already there: published summaries, tables of one number a run, and input that cannot be compared."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

import analysis
from analysis.compare import main

SLEEP = (
    [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0],
    [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4],
)
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
        ([*PUBLISHED, "--margin", "1000%"], "below 100%"),
        ([*PUBLISHED, "--margin", "inf"], "positive and finite"),
        (
            [
                "--summary",
                "a:1,1,9999999999",
                "--summary",
                "b:1,1,3",
                "--baseline",
                "b",
                "--margin",
                "1",
            ],
            "n counts runs",
        ),
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
        [1.0, 1.1, 1.2], [1.0, 1.05, 1.1], margin=0.1, scale="ratio", level=0.99
    )
    assert comparison.level == pytest.approx(0.99)
    assert str(comparison).startswith("INCONCLUSIVE: ratio 1.046, 99% CI [0.7404, 1.476], n = 3")


@pytest.mark.parametrize(
    ("a", "b", "verdict", "why"),
    [
        ([1.0, 2.0], [1.0, 2.0], "INCONCLUSIVE", "n = 2"),
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], "INVALID", "all 3 values are 1"),
        ([1.0, math.nan, 2.0], [1.0, 2.0, 3.0], "INVALID", "not finite"),
        ([1.0, math.inf, 2.0], [1.0, 2.0, 3.0], "INVALID", "not finite"),
    ],
)
def test_from_python_numbers_without_inference_get_a_verdict_and_a_reason(a, b, verdict, why):
    comparison = analysis.compare(a, b, margin=0.1)
    assert comparison.verdict == verdict and why in comparison.reasons[0]
    assert math.isnan(comparison.estimate) and why in str(comparison)


def test_from_python_a_direction_makes_better_or_worse():
    fast, slow = [1.0, 1.1, 0.9, 1.05], [2.0, 2.1, 1.9, 2.05]
    assert "DIFFERENT (better)" in str(analysis.compare(fast, slow, margin=0.1, direction="lower"))
    assert "DIFFERENT (lower)" in str(analysis.compare(fast, slow, margin=0.1))


@pytest.mark.parametrize(
    "options",
    [
        {"level": 95},
        {"level": 0.6},
        {"scale": "log"},
        {"direction": "up"},
        {"margin": 0},
        {"margin": math.inf},
        {"margin": 10, "scale": "ratio"},
    ],
)
def test_from_python_a_wrong_option_is_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        analysis.compare([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], **{"margin": 0.1, **options})


def test_from_python_pairs_of_the_sleep_data():
    """Student 1908: R's paired t.test gives t = -4.0621, df = 9, p = 0.002833, 95 % CI [-2.4598858, -0.7001142]."""
    comparison = analysis.compare(SLEEP[0], SLEEP[1], margin=1.0, paired=True)
    assert (comparison.t, comparison.df) == (pytest.approx(-4.0621, abs=5e-5), 9)
    assert comparison.p_difference == pytest.approx(0.002833, abs=5e-7)
    assert (comparison.ci_low, comparison.ci_high) == pytest.approx(
        (-2.4598858, -0.7001142), abs=1e-6
    )
    assert comparison.correlation == pytest.approx(0.7952, abs=5e-5)


def test_a_table_is_paired_by_a_column_whatever_the_order_of_its_rows(tmp_path, capsys):
    rows = "a,2,3.0\nb,0,0.5\na,0,1.0\nb,1,1.4\na,1,2.0\nb,2,2.6\n"
    path = write_table(tmp_path, rows)
    (record,) = records(capsys, path, "--baseline", "b", "--margin", "1", "--pair-by", "seed")
    assert record["paired"] and record["estimate"] == pytest.approx(0.5)
    # differences 0.5, 0.6, 0.4: standard error 0.1 / sqrt(3)
    assert record["t"] == pytest.approx(0.5 / (0.1 / 3**0.5))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a,0,1\na,1,2\na,2,3\nb,0,1\nb,1,3\n", "seed 2 is not in every arm"),
        ("a,0,1\na,0,2\na,2,3\nb,0,1\nb,2,3\n", "a has several rows with seed 0"),
    ],
)
def test_pairs_that_are_none_are_one_clear_line(tmp_path, capsys, rows, message):
    path = write_table(tmp_path, rows)
    assert main([path, "--baseline", "b", "--margin", "1", "--pair-by", "seed"]) == 1
    assert message in capsys.readouterr().err


def test_names_that_look_like_markup_are_printed_as_they_are(tmp_path, capsys):
    rows = "[/]x,0,1\n[/]x,1,2\n[/]x,2,4\nb,0,1\nb,1,2\nb,2,3\n"
    assert main([write_table(tmp_path, rows), "--baseline", "b", "--margin", "1"]) == 0
    assert "[/]x against b" in capsys.readouterr().out


def test_a_json_object_of_arms_is_a_table(tmp_path, capsys):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"a": [1.0, 1.2, 1.1], "b": [1.0, 1.1, 1.3]}))
    (record,) = records(capsys, str(path), "--baseline", "b", "--margin", "1")
    assert record["n"] == 3 and record["mean"] == pytest.approx(1.1)


def test_reading_a_plan_does_not_load_the_statistics():
    code = "import sys, analysis.plan; print('scipy' in sys.modules, 'matplotlib' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "False"]
