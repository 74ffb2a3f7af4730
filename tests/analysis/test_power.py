"""Power against values from simulation (20,000 draws) and from statsmodels' noncentral t."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from statsmodels.stats.power import TTestIndPower, TTestPower

from analysis.power import main, outlook
from analysis.sample_size import (
    NeededRuns,
    needed_runs,
    non_inferiority_power,
    power_table,
    runs_for_difference,
    runs_for_equivalence,
    smallest_margin,
    tost_power,
    welch_power,
)
from tests.analysis.synthetic import ACCURACY, write_experiment

ROOT = Path(__file__).parents[2]
LEAN_SD, HEAVY_SD, HEAVY_MEAN = 2.3, 10.3, 109.5


@pytest.mark.parametrize(("n", "power"), [(3, 0.16), (5, 0.34), (8, 0.69), (10, 0.84)])
def test_power_to_show_the_published_parity_at_ten_percent(n, power):
    found = tost_power(n, LEAN_SD, HEAVY_SD, 0.10 * HEAVY_MEAN)
    assert found == pytest.approx(power, abs=0.01)


@pytest.mark.parametrize(("n", "power"), [(3, 0.20), (10, 0.76)])
def test_power_to_see_the_published_gap(n, power):
    assert welch_power(n, LEAN_SD, HEAVY_SD, 9.9) == pytest.approx(power, abs=0.01)


@pytest.mark.parametrize(("n", "difference"), [(10, 1.5), (20, 1.0), (64, 0.5)])
def test_welch_power_of_equal_spreads_is_the_noncentral_t(n, difference):
    exact = TTestIndPower().power(difference, nobs1=n, alpha=0.05)
    assert welch_power(n, 1.0, 1.0, difference) == pytest.approx(exact, abs=0.012)


@pytest.mark.parametrize(("margin", "n"), [(0.5, 69), (1.0, 18), (1.5, 9), (2.0, 6), (3.0, 4)])
def test_runs_needed_to_show_equivalence(margin, n):
    assert runs_for_equivalence(1.0, 1.0, margin) == pytest.approx(n, abs=1)


@pytest.mark.parametrize(("difference", "n"), [(0.5, 64), (1.0, 17), (1.5, 9), (2.0, 6)])
def test_runs_needed_to_see_a_difference(difference, n):
    assert runs_for_difference(1.0, 1.0, difference) == n


def test_about_ten_runs_would_settle_the_published_parity():
    needed = needed_runs(LEAN_SD, HEAVY_SD, df=2.2, margin=0.10 * HEAVY_MEAN)
    assert needed.estimate == 10
    assert needed.low < needed.estimate < needed.high


def test_more_runs_than_anyone_has_is_said_so():
    assert runs_for_equivalence(1.0, 1.0, 0.001) is None
    assert "more than 10,000" in str(NeededRuns(5000, None, None))


def test_a_number_of_runs_just_below_the_most_is_found():
    """Normal quantiles: n = 2 ((1.645 + 1.282) / margin)^2 is 8,565 runs a side for a margin of 0.04473."""
    assert runs_for_equivalence(1.0, 1.0, 0.04473) == pytest.approx(8565, rel=0.01)


def test_tost_power_is_alpha_at_the_margin():
    """At a true difference of exactly the margin TOST must err at most at alpha."""
    assert tost_power(20, 1.0, 1.0, 3.0, difference=3.0) == pytest.approx(0.05, abs=0.002)


def test_smallest_margin_scales_with_the_spread():
    units, doubled = power_table((3, 10)), power_table((3, 10), spread=2.0)
    assert doubled[1].smallest_margin == pytest.approx(2 * units[1].smallest_margin, rel=1e-6)
    assert 3.0 < units[0].smallest_margin < 3.5


def test_two_runs_a_side_are_refused():
    with pytest.raises(ValueError, match="n = 2"):
        power_table((2, 3))


def test_power_of_non_inferiority_is_a_one_sided_noncentral_t():
    """statsmodels, one-sided at alpha 0.05: 20 runs a side, a true lead of one margin of 0.8 SD over the bound."""
    exact = TTestIndPower().power(0.8, nobs1=20, alpha=0.05, alternative="larger")
    assert non_inferiority_power(20, 1.0, 1.0, 0.8) == pytest.approx(exact, abs=0.01)


def test_power_of_pairs_is_that_of_a_one_sample_test():
    """statsmodels' one-sample t: 10 pairs, a difference of one SD of the differences."""
    exact = TTestPower().power(1.0, nobs=10, alpha=0.05)
    assert welch_power(10, 1.0, None, 1.0) == pytest.approx(exact, abs=0.012)


def test_the_smallest_margin_is_the_one_at_which_the_power_is_as_asked():
    margin = smallest_margin(5, 1.0, 2.0)
    assert tost_power(5, 1.0, 2.0, margin) == pytest.approx(0.8, abs=1e-3)


def test_a_one_sided_claim_asks_for_less():
    """Large n, normal quantiles: (1.645 + 0.842) against (1.645 + 1.282) standard errors."""
    ratio = smallest_margin(2000, 1.0, 1.0, one_sided=True) / smallest_margin(2000, 1.0, 1.0)
    assert ratio == pytest.approx((1.645 + 0.842) / (1.645 + 1.282), rel=0.002)
    declared = ACCURACY.model_copy(update={"non_inferiority": True})
    assert "can show NON-INFERIOR within 0.03" in outlook(declared, 5, None)


def test_the_command_reads_an_experiment_without_a_pilot(capsys):
    """3 runs a side show a margin of 3.0 to 3.5 spreads, so 0.05 needs a spread of at most 0.014 to 0.017."""
    assert main([str(ROOT / "experiments" / "moe_vl.yaml"), "--scale", "tiny"]) == 0
    printed = capsys.readouterr().out
    assert "3 runs a side can show EQUIVALENT within ±0.05 share (power 80%)" in printed
    assert 0.014 <= float(re.search(r"at most (\S+) share", printed)[1]) <= 0.017


def test_the_command_plans_with_a_pilots_spread(sound, capsys):
    path = str(ROOT / "experiments" / "moe_vl.yaml")
    assert main([path, "--pilot", str(sound), "--runs", "3", "5"]) == 0
    printed = capsys.readouterr().out
    assert "held-out accuracy: with the pilot's spread (molt" in printed
    assert len(re.findall(r"│ +3 │.*│ +\d+% │ +\d+% │", printed)) == 3  # a table an endpoint
    assert "the declared one takes n = " in printed


def test_a_pilot_alone_brings_its_own_plan(sound, capsys):
    assert main(["--pilot", str(sound), "--runs", "3"]) == 0
    assert "within ±0.03 accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.yaml"], "nothing.yaml: cannot be read"),
        ([str(ROOT / "pyproject.toml")], "cannot be read"),
        ([str(ROOT / "experiments" / "moe_vl.yaml"), "--scale", "moon"], "has tiny, h100x16"),
        (["--pilot", "nowhere"], "no frozen plan"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_line(capsys, arguments, message):
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_pilot_without_finished_runs_is_said_so(tmp_path, capsys):
    lost = {(system, seed): "oom" for system in ("molt", "megatron") for seed in (0, 1)}
    folder = write_experiment(tmp_path, seeds=(0, 1), steps=4, lost=lost)
    assert main(["--pilot", str(folder)]) == 1
    assert "no spread to plan by" in capsys.readouterr().err


def test_a_pilot_with_a_value_that_has_no_ratio_is_refused(tmp_path, capsys):
    """One arm on logarithms and one on raw seconds would be two units in one formula."""

    def stuck_clock(system, seed, record):
        if (system, seed) == ("molt", 0) and "wall_s" in record:
            record["wall_s"] = 0.0

    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=12, edit_record=stuck_clock)
    assert main(["--pilot", str(folder)]) == 1
    assert "step time of molt is 0 in a run, and a ratio needs positive" in capsys.readouterr().err
