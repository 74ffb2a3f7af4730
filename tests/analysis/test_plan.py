"""The plan is frozen once, amended in the open, and refuses what it cannot honour."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from analysis.endpoint import Endpoint, Rate
from analysis.plan import Amendment, Arm, Plan, PlanError, PlannedRun, freeze

ACCURACY = Endpoint(
    name="accuracy",
    field="eval_reward_mean",
    summary="at_last_step",
    unit="share",
    direction="higher",
    margin=0.03,
    margin_reason="three of a hundred items is the least a user would notice",
    scale="absolute",
    primary=True,
)
TIME = Endpoint(
    name="trainer time",
    field=Rate(
        numerator=("t_forward_backward_s", "t_optimizer_s"), denominator=("tokens_forward",)
    ),
    summary="total_rate",
    unit="s/token",
    direction="lower",
    margin=0.1,
    margin_reason="a tenth is below a change of cluster",
    scale="ratio",
    primary=True,
)


def make_plan(**changes) -> Plan:
    fields = dict(
        experiment="moe_vl",
        question="Is FSDP2 as good as Megatron?",
        scale="tiny",
        endpoints=(ACCURACY, TIME),
        arms=(Arm(name="molt", role="candidate"), Arm(name="megatron", role="baseline")),
        seeds=(0, 1, 2),
        identities={"molt-s0-aaaaaaaa": PlannedRun(system="molt", seed=0, identity="a" * 64)},
        order=("molt-s0-aaaaaaaa",),
    )
    return Plan(**{**fields, **changes})


def test_a_frozen_plan_reads_back_equal(tmp_path):
    plan = freeze(make_plan(), tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_the_same_plan_again_changes_nothing(tmp_path):
    path = tmp_path / "plan.json"
    freeze(make_plan(), path)
    before = path.read_bytes()
    freeze(make_plan(), path)
    assert path.read_bytes() == before


def test_a_wider_margin_after_a_run_is_an_amendment_that_names_the_run(tmp_path):
    path = tmp_path / "plan.json"
    first = freeze(make_plan(), path)
    (tmp_path / "molt-s0-aaaaaaaa").mkdir()
    (tmp_path / "molt-s0-aaaaaaaa" / "metrics.jsonl").write_text('{"step": 1}')
    wider = ACCURACY.model_copy(update={"margin": 0.2})
    freeze(make_plan(endpoints=(wider, TIME)), path)
    plan = Plan.load(path)
    (amendment,) = plan.amendments
    assert amendment.diff == {"endpoints.accuracy.margin": (0.03, 0.2)}
    assert amendment.runs_done == ("molt-s0-aaaaaaaa",)
    assert plan.created == first.created
    assert plan.endpoints[0].margin == 0.2


def test_a_warm_up_is_no_run_whose_result_could_be_seen(tmp_path):
    path = tmp_path / "plan.json"
    freeze(make_plan(), path)
    (tmp_path / "warmup-bbbbbbbb").mkdir()
    for name in ("done.json", "metrics.jsonl"):
        (tmp_path / "warmup-bbbbbbbb" / name).write_text("{}")
    amended = freeze(make_plan(seeds=(0, 1, 2, 3)), path)
    assert amended.amendments[0].runs_done == () and amended.looks == 1


def test_replacing_runs_that_had_records_is_another_look(tmp_path):
    path = tmp_path / "plan.json"
    freeze(make_plan(), path)
    (tmp_path / "molt-s0-aaaaaaaa").mkdir()
    (tmp_path / "molt-s0-aaaaaaaa" / "metrics.jsonl").write_text('{"step": 1}')
    again = {"molt-s0-cccccccc": PlannedRun(system="molt", seed=0, identity="c" * 64)}
    replaced = freeze(make_plan(identities=again), path)
    assert replaced.looks == 2 and replaced.alpha_per_look == pytest.approx(0.005)
    wider = ACCURACY.model_copy(update={"margin": 0.2})
    later = freeze(make_plan(identities=again, endpoints=(wider, TIME)), path)
    assert later.amendments[1].runs_done == ("molt-s0-aaaaaaaa",) and later.looks == 2


def test_however_many_looks_some_look_is_false_in_at_most_six_percent():
    """The union bound: the levels of 50 looks sum to at most 0.06."""
    change = Amendment(time=datetime.now(UTC), diff={"seeds": ([0], [0, 1])}, runs_done=("r",))
    levels = [make_plan(amendments=(change,) * late).alpha_per_look for late in range(50)]
    assert levels[0] == 0.05 and levels[1:] == sorted(levels[1:], reverse=True)
    assert 0.0599 < sum(levels) <= 0.06


def test_freezing_leaves_no_temporary_file(tmp_path):
    freeze(make_plan(), tmp_path / "plan.json")
    freeze(make_plan(seeds=(0, 1, 2, 3)), tmp_path / "plan.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_an_absent_plan_names_the_file(tmp_path):
    with pytest.raises(PlanError, match="plan.json: no frozen plan"):
        Plan.load(tmp_path / "plan.json")


def test_another_schema_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    freeze(make_plan(), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))
    with pytest.raises(PlanError, match="schema_version 99"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"endpoints": (ACCURACY.model_copy(update={"primary": False}),)}, "must be primary"),
        ({"arms": (Arm(name="a", role="candidate"), Arm(name="b", role="candidate"))}, "baseline"),
        ({"pairing_unit": "node"}, "pairing_unit"),
        ({"alpha": 0.4}, "less than or equal to 0.05"),
        ({"seeds": (0, 0)}, "seeds: 0 appears more than once"),
        ({"endpoints": (ACCURACY, ACCURACY)}, "accuracy appears more than once"),
        (
            {"identities": {"x": PlannedRun(system="slime", seed=0, identity="a")}},
            "identities.x: system slime",
        ),
    ],
)
def test_an_incomplete_plan_is_refused_with_its_key(changes, message):
    with pytest.raises(ValidationError, match=message):
        make_plan(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"summary": "total_rate"}, "needs field"),
        ({"summary": "final_window_mean"}, "window"),
        ({"margin": 0}, "greater than 0"),
        ({"margin": float("inf")}, "finite number"),
        ({"margin": 10, "scale": "ratio"}, "write 0.1 for 10 %"),
        ({"margin_reason": ""}, "at least 1 character"),
        ({"margn": 1}, "Extra inputs"),
        ({"summary": "steps_to_threshold", "direction": "lower"}, "threshold belongs to"),
        ({"summary": "seconds_to_threshold", "threshold": 0.8}, "direction is lower"),
    ],
)
def test_an_endpoint_that_cannot_be_computed_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        Endpoint(**{**ACCURACY.model_dump(), **changes})


def test_an_endpoint_with_a_duration_is_a_speed_endpoint():
    assert (ACCURACY.kind, TIME.kind) == ("learning", "speed")
    assert not TIME.includes_waiting
