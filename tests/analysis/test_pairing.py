"""Pairs: by seed for what is learned, by block in time for a duration, and only where the block held."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from analysis.load import load_experiment
from analysis.plan import Plan
from analysis.verdict import judge
from tests.analysis.synthetic import ACCURACY, TRAINER_TIME, write_experiment


def results(folder):
    return {result.endpoint.name: result for result in judge(load_experiment(folder))}


def shared(system, seed, record):
    """A difficulty that both arms of a seed share: it moves accuracy by up to 4 points."""
    if "eval_reward_mean" in record and record["step"]:
        record["eval_reward_mean"] += 0.02 * (seed - 2)


def test_a_declared_unit_pairs_and_shows_its_correlation(tmp_path):
    folder = write_experiment(tmp_path, steps=20, edit_record=shared, pairing_unit="seed")
    result = results(folder)[ACCURACY.name]
    values = [list(result.measurement.values[name].values()) for name in ("molt", "megatron")]
    by_hand = stats.ttest_rel(*values)
    assert result.comparison.paired and result.comparison.df == 4
    assert result.comparison.p_difference == pytest.approx(by_hand.pvalue)
    assert result.comparison.correlation == pytest.approx(np.corrcoef(*values)[0, 1])
    assert result.comparison.correlation > 0.8 and "5 pairs" in result.may_write


def test_without_a_declared_unit_every_run_counts_alone(tmp_path):
    folder = write_experiment(tmp_path, steps=20, edit_record=shared)
    assert not results(folder)[ACCURACY.name].comparison.paired


def test_a_time_pairs_where_the_runs_of_a_block_followed_each_other(tmp_path):
    folder = write_experiment(tmp_path, steps=20, pairing_unit="seed")
    assert results(folder)[TRAINER_TIME.name].comparison.paired


def test_a_time_does_not_pair_where_its_blocks_were_torn_apart(tmp_path):
    def delayed(system, seed, record):
        if (system, seed) == ("molt", 1):
            record["time_unix"] += 1e6

    folder = write_experiment(tmp_path, steps=20, edit_record=delayed, pairing_unit="seed")
    found = results(folder)
    assert found[ACCURACY.name].comparison.paired
    assert not found[TRAINER_TIME.name].comparison.paired
    assert any("seed 1 did not start" in c for c in found[TRAINER_TIME.name].cautions)


def test_a_seed_that_lost_its_partner_is_left_out_and_named(tmp_path):
    folder = write_experiment(tmp_path, steps=20, lost={("molt", 2): "oom"}, pairing_unit="seed")
    result = results(folder)[ACCURACY.name]
    assert result.comparison.n == 4 and result.measurement.used_seeds[0] == (0, 1, 3, 4)
    assert any("seed 2 has no partner" in caution for caution in result.cautions)


def test_leaving_one_out_leaves_a_pair_out(tmp_path):
    folder = write_experiment(tmp_path, steps=20, edit_record=shared, pairing_unit="seed")
    omissions = results(folder)[ACCURACY.name].omissions
    assert [(o.arm, o.seed) for o in omissions] == [("molt", seed) for seed in range(5)]
    assert all(o.comparison.paired and o.comparison.n == 4 for o in omissions)


def test_the_unit_is_part_of_the_plan(tmp_path):
    folder = write_experiment(tmp_path, steps=2, pairing_unit="seed")
    assert Plan.load(folder / "plan.json").pairing_unit == "seed"
