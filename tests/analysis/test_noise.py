"""The noise floor: what is shown beside the differences, and where two runs of one seed part."""

from __future__ import annotations

import math

import pytest

from analysis.load import load_experiment
from analysis.noise import NoiseFloor, noise_floor, partings
from analysis.verdict import judge
from tests.analysis.synthetic import ACCURACY, write_experiment


def test_the_spread_of_one_seed_is_pooled_by_hand():
    """Sums of squares 2 and 0.5 over 1 + 1 degrees of freedom: sqrt(2.5 / 2)."""
    floor = NoiseFloor((), {"molt": (1.0, 3.0), "megatron": (4.0, 5.0)})
    assert floor.same_seed_sd == pytest.approx(math.sqrt(1.25))


def test_without_repeats_or_control_there_is_no_floor(tmp_path):
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=4, controls=0)
    floor = noise_floor(load_experiment(folder), ACCURACY)
    assert floor.same_seed_sd is None and floor.control_mean is None


def test_repeats_and_controls_enter_the_floor_and_no_comparison(tmp_path):
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=20, controls=2, repeats=2)
    experiment = load_experiment(folder)
    floor = noise_floor(experiment, ACCURACY)
    assert len(floor.control) == 2 and {len(v) for v in floor.repeats.values()} == {3}
    assert floor.control_mean == pytest.approx(0.42, abs=0.03)
    assert judge(experiment)[0].comparison.n == 3
    first = experiment.finished("molt")[0].metrics["eval_reward_mean"].iloc[-1]
    assert floor.repeats["molt"][0] == first


def lockstep(system, seed, run):
    run["config"]["loop"]["schedule"] = "lockstep"


def same_until(step):
    """Both arms record the same rewards and tokens up to a step."""

    def edit(system, seed, record):
        if record["step"]:
            record["reward_mean"] = 0.5
            record["trained_fingerprint"] = f"groups-{record['step']}"
            if record["step"] >= step and system == "molt":
                record["tokens_generated"] += 1

    return edit


def test_under_lockstep_the_first_step_apart_is_found(tmp_path):
    folder = write_experiment(
        tmp_path, seeds=(0, 1, 2), steps=8, edit_run=lockstep, edit_record=same_until(5)
    )
    found = partings(load_experiment(folder))
    assert [(p.seed, p.step, p.field) for p in found] == [
        (seed, 5, "tokens_generated") for seed in (0, 1, 2)
    ]


def test_two_runs_that_never_part_are_said_so(tmp_path):
    folder = write_experiment(
        tmp_path, seeds=(0,), steps=8, edit_run=lockstep, edit_record=same_until(99), repeats=1
    )
    found = partings(load_experiment(folder))
    assert [p.step for p in found] == [None] * 3  # the arms, and each arm with its repeat


def test_a_free_schedule_has_no_parting(tmp_path):
    assert partings(load_experiment(write_experiment(tmp_path, seeds=(0,), steps=4))) == ()
