"""Power against values from simulation (20,000 draws) and from statsmodels' noncentral t."""

from __future__ import annotations

import pytest
from statsmodels.stats.power import TTestIndPower

from analysis.power import (
    NeededRuns,
    main,
    needed_runs,
    power_table,
    runs_for_difference,
    runs_for_equivalence,
    tost_power,
    welch_power,
)

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


def test_the_command_prints_the_pilots_endpoints(sound, capsys):
    main([str(sound), "--runs", "3", "5"])
    printed = capsys.readouterr().out
    assert "held-out accuracy, margin ±0.03 accuracy" in printed
    assert "step time, margin ±10" in printed
