"""Every check fails on its planted fault, alone among its kind, and passes without it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from analysis.checks import Pair
from analysis.endpoint import Rate
from analysis.load import load_experiment
from analysis.sensitivity import check_endpoint
from analysis.validity import check_runs
from analysis.verdict import Verdict, judge
from tests.analysis.synthetic import (
    ACCURACY,
    MEGATRON,
    MOLT,
    STEP_TIME,
    TRAINER_TIME,
    write_experiment,
)


def checks_of(folder):
    return {check.name: check for check in check_runs(Pair(load_experiment(folder), "molt"))}


def set_field(name, value, system="molt", seed=1, step=12):
    """A fault: one field of one record of one run."""

    def edit(of_system, of_seed, record):
        if (of_system, of_seed) == (system, seed) and record["step"] >= step:
            record[name] = value(record) if callable(value) else value

    return {"edit_record": edit}


def drop_field(name, system="molt"):
    def edit(of_system, of_seed, record):
        if of_system == system:
            record.pop(name, None)

    return {"edit_record": edit}


def set_run(change, system="molt", seed=1):
    def edit(of_system, of_seed, run):
        if (of_system, of_seed) == (system, seed):
            change(run)

    return {"edit_run": edit}


FAULTS = {
    "finite records": (set_field("loss", float("nan")), "loss is nan at step 12"),
    "full length": (
        {"edit_run": lambda system, seed, run: run["config"]["loop"].update(steps=99)},
        "ends at step 20, loop.steps is 99",
    ),
    "policy updated": (set_field("grad_norm", 0.0, step=1), "grad_norm > 0 in 0% of the steps"),
    "samples kept": (set_field("kept_fraction", 0.01, step=1), "keeps 1.0% of its samples"),
    "same distribution": (set_field("mismatch_p99", 2e-5, step=1), "mismatch_p99 2e-5 at step 1"),
    "steady mismatch": (
        set_field("mismatch_p99", lambda record: 1e-7 * 1.25 ** record["step"], step=1),
        "p99 grows 69-fold over the run",  # 1.25 ** 19
    ),
    "similar work": (set_field("tokens_forward", 6000, step=1), "tokens a step: 3,200 against 4,133"),
    "same nodes": ({"hosts": lambda system, seed: system}, "the arms never ran on one node"),
    "books closed": (
        set_field("tokens_trained", lambda record: record["tokens_trained"] - 3),
        "3 tokens unaccounted for at step 12",
    ),
    "lag bounded": (set_field("lag_max", 3), "lag_max 3, loop.max_staleness is 1"),
    "similar lag": (set_field("lag_mean", 2.0, step=1), "mean lag differs by"),
    "same protocol": (
        set_run(lambda run: run["config"]["optimizer"].update(lr=2e-3)),
        "optimizer.lr: 0.001 or 0.002",
    ),
    "same prompts": (set_field("prompts_fingerprint", "others"), "seed 1: prompts differ from step 12"),
    "same initial checkpoint": (
        set_run(lambda run: run.update(warmup_content_hash="other")),
        "warmup_content_hash has 2 values",
    ),
    "same code": (set_run(lambda run: run["fingerprints"].update(code="other")), "has 2 values"),
    "same packages": (set_run(lambda run: run["fingerprints"].update(packages="x")), "2 values"),
    "same hardware": (
        set_run(lambda run: run["fingerprints"].update(hardware={"cpu": "other"})),
        "has 2 values",
    ),
    "interleaved in time": (
        {"edit_record": lambda system, seed, r: r.update(time_unix=r["time_unix"] + 1e6 * (system == "molt"))},
        "every run of megatron ended before molt began",
    ),
    "conformance": (set_run(lambda run: run["conformance"].update(passed=False)), "failed in molt-s1"),
    "no forced retry": (
        set_run(lambda run: run.update(forced=[{"state": "DIVERGED", "attempt": 1}])),
        "tried again by force after DIVERGED",
    ),
    "router ties": (set_field("tokens_router_tied", 5, step=0), "of the probed tokens"),
    "run accounting": ({"seeds": (0, 1, 2, 3), "lost": {("molt", 0): "oom", ("molt", 1): "oom"}}, "molt: 2 runs lost"),
}  # fmt: skip

ALSO_OF_LEARNING = "same hardware for learning"
"""The flag beside the refusal of "same hardware"."""

MORE_FAULTS = {
    "policy updated": [
        (set_field("optimizer_steps", 0, step=0), "optimizer_steps rises in 0% of the steps"),
        (set_field("policy_version", 2, step=2), "policy_version rises in 10% of the steps"),
        (drop_field("grad_norm"), "grad_norm was never recorded"),
        (set_field("grad_norm", None), "grad_norm is missing at step 12"),
    ],
    "same distribution": [
        (set_field("mismatch_max", 2e-3), "mismatch_max 0.002 at step 12"),
        (drop_field("mismatch_p99"), "mismatch_p99 was never recorded"),
        (set_field("mismatch_tokens", 100), "100 tokens probed at step 12"),
        (set_field("mismatch_p99", None), "mismatch_p99 is missing at step 12"),
        (set_field("mismatch_max", None), "mismatch_max is missing at step 12"),
    ],
    "lag bounded": [(set_field("lag_max", None), "lag_max is missing at step 12")],
    "books closed": [
        (set_field("groups_in_flight", 7), "1 groups unaccounted for at step 12"),
        (drop_field("tokens_in_flight"), "tokens_in_flight was never recorded"),
    ],
}


def test_a_run_that_went_on_after_an_upgrade_names_the_package(tmp_path):
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=20)
    for number, version in (("01", "2.12"), ("02", "2.13")):
        for run in folder.glob("molt-s1*"):
            attempt = run / "attempts" / number
            attempt.mkdir(exist_ok=True)
            start = {"time": 1.0, "host": "a", "packages": {"torch": version, "numpy": "2.0"}}
            (attempt / "start.json").write_text(json.dumps(start))
    check = checks_of(folder)["same packages"]
    assert (check.passed, check.effect) == (False, "flag")
    assert "torch 2.12 or 2.13" in check.found and "numpy" not in check.found


def planted(tmp_path, fault):
    return write_experiment(tmp_path, **{"seeds": (0, 1, 2), "steps": 20, **fault})


def test_a_sound_experiment_passes_every_check(sound):
    assert {name: check.passed for name, check in checks_of(sound).items()} == dict.fromkeys(
        [*FAULTS, "not restarted", "nothing beyond the plan", "no result removed", "plan as frozen"]
        + [ALSO_OF_LEARNING],
        True,
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_its_check_and_no_other(tmp_path, name):
    fault, message = FAULTS[name]
    failing = {n: c for n, c in checks_of(planted(tmp_path, fault)).items() if c.passed is not True}
    assert [n for n in failing if n != ALSO_OF_LEARNING] == [name]
    assert message in failing[name].found


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [(name, *case) for name, cases in MORE_FAULTS.items() for case in cases],
)
def test_a_check_sees_its_other_faults(tmp_path, name, fault, message):
    check = checks_of(planted(tmp_path, fault))[name]
    assert check.passed is False and message in check.found


def test_steps_trained_again_are_flagged_and_a_run_that_only_went_on_is_not(tmp_path):
    folder = planted(tmp_path, set_field("attempt", 2))  # from step 12 on
    assert checks_of(folder)["not restarted"].passed
    (metrics,) = folder.glob("molt-s1-*/metrics.jsonl")
    again = [json.loads(line) | {"attempt": 1} for line in metrics.read_text().splitlines()[12:15]]
    metrics.write_text("".join(json.dumps(r) + "\n" for r in again) + metrics.read_text())
    check = checks_of(folder)["not restarted"]
    assert check.passed is False and "3 steps trained again" in check.found


def test_a_declared_switch_may_differ_and_nothing_else(tmp_path):
    def cached(system, seed, run):
        run["config"]["engine"]["prefix_caching"] = system == "molt"

    folder = planted(tmp_path, {"edit_run": cached})
    plan = json.loads((folder / "plan.json").read_text())
    assert not checks_of(folder)["same protocol"].passed
    (folder / "plan.json").write_text(json.dumps({**plan, "switch": "engine.prefix_caching"}))
    assert checks_of(folder)["same protocol"].passed


def test_a_run_of_one_step_can_have_updated_its_policy(tmp_path):
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=1)
    assert checks_of(folder)["policy updated"].passed


def test_a_probe_is_asked_for_where_it_was_due_and_nowhere_else(tmp_path):
    def every_third(system, seed, record):
        if record["step"] % 3:
            for name in ("mismatch_p99", "mismatch_max", "mismatch_tokens"):
                record.pop(name)

    def declare(system, seed, run):
        run["config"]["probe"]["every"] = 3

    fault = {"edit_record": every_third, "edit_run": declare}
    assert checks_of(planted(tmp_path, fault))["same distribution"].passed


def test_a_finished_run_without_records_fails_and_does_not_stop_the_checks(tmp_path):
    folder = planted(tmp_path, {})
    next(folder.glob("molt-s1-*/metrics.jsonl")).unlink()
    check = checks_of(folder)["full length"]
    assert check.passed is False and "no records" in check.found


def test_one_lost_run_is_borne_and_uneven_loss_is_not(tmp_path):
    one = write_experiment(tmp_path / "one", steps=4, lost={("molt", 0): "oom"})
    assert checks_of(one)["run accounting"].passed
    uneven = write_experiment(
        tmp_path / "uneven", steps=4, lost={("molt", seed): "oom" for seed in (0, 1, 2)}
    )
    found = checks_of(uneven)["run accounting"].found
    assert "Fisher p = 0.167" in found  # hypergeometric, by hand: 2 * C(5,3) / C(10,3) = 1/6


def test_a_missing_conformance_is_unverified_and_caps_equivalence(tmp_path):
    fault = {"edit_run": lambda system, seed, run: run.pop("conformance")}
    check = checks_of(planted(tmp_path, fault))["conformance"]
    assert check.passed is None and check.caps and not check.refuses


def test_hardware_guards_speed_and_not_learning(sound):
    assert checks_of(sound)["same hardware"].endpoints == (TRAINER_TIME.name, STEP_TIME.name)
    flag = checks_of(sound)[ALSO_OF_LEARNING]
    assert flag.endpoints == (ACCURACY.name,) and flag.effect == "flag"


def sensitivity(folder, endpoint, values):
    pair = Pair(load_experiment(folder), "molt")
    return {check.name.split()[0]: check for check in check_endpoint(pair, endpoint, values)}


GOOD = {"molt": [0.88, 0.89, 0.87], "megatron": [0.88, 0.86, 0.87]}


def test_identical_values_have_no_resolution(sound):
    check = sensitivity(sound, TRAINER_TIME, {"molt": [1.0] * 3, "megatron": [1.0] * 3})[
        "resolution"
    ]
    assert check.refuses and "molt: all values are 1" in check.found


def test_coarse_values_are_flagged(sound):
    values = {"molt": [1.0, 1.0, 1.0, 1.0, 2.0], "megatron": [1.0, 2.0, 3.0, 4.0, 5.0]}
    check = sensitivity(sound, TRAINER_TIME, values)["resolution"]
    assert check.passed is False and check.effect == "flag"


def test_a_task_that_no_arm_learned_is_invalid_and_one_that_one_arm_learned_is_not(sound):
    name = ACCURACY.name.split()[0]
    stuck = {"molt": [0.42, 0.43, 0.41], "megatron": [0.43, 0.42, 0.44]}
    neither = sensitivity(sound, ACCURACY, stuck)
    assert neither[name].refuses
    one = sensitivity(sound, ACCURACY, {**GOOD, "molt": stuck["molt"]})[name]
    assert one.caps and not one.refuses
    assert sensitivity(sound, ACCURACY, GOOD)[name].passed


def test_speed_is_invalid_where_no_arm_learned_and_not_equivalent_where_one_did_not(tmp_path):
    def stuck(*systems):
        def edit(system, seed, record):
            if system in systems and "eval_reward_mean" in record:
                record["eval_reward_mean"] = 0.42 + 0.001 * seed

        return {"edit_record": edit}

    name = ACCURACY.name.split()[0]
    neither = planted(tmp_path / "neither", stuck("molt", "megatron"))
    assert sensitivity(neither, TRAINER_TIME, GOOD)[name].refuses
    one = sensitivity(planted(tmp_path / "one", stuck("molt")), TRAINER_TIME, GOOD)[name]
    assert one.caps and not one.refuses
    assert TRAINER_TIME.name in one.endpoints


def test_at_the_ceiling_equivalence_may_not_be_claimed(sound):
    near = {"molt": [0.98, 0.99, 0.985], "megatron": [0.88, 0.86, 0.87]}
    assert sensitivity(sound, ACCURACY, near)["headroom"].caps
    assert sensitivity(sound, ACCURACY, GOOD)["headroom"].passed


def test_a_waiting_trainer_makes_the_step_time_insensitive(tmp_path):
    arms = {"molt": replace(MOLT, wait_share=0.5), "megatron": MEGATRON}
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=20, arms=arms)
    check = sensitivity(folder, STEP_TIME, GOOD)["waiting"]
    assert check.caps and "molt waits longer" in check.found
    assert "waiting" not in sensitivity(folder, TRAINER_TIME, GOOD)


def test_a_failing_check_makes_good_numbers_invalid(tmp_path):
    fault = set_field("mismatch_max", 0.5)
    results = judge(load_experiment(write_experiment(tmp_path, steps=20, **fault)))
    assert {result.decision.verdict for result in results} == {Verdict.INVALID}
    assert all("same distribution" in result.decision.headline for result in results)
    assert all("support no statement" in result.may_write for result in results)


def test_a_finished_run_without_the_number_is_invalid(tmp_path):
    endpoint = TRAINER_TIME.model_copy(
        update={"field": Rate(numerator=("t_x_s",), denominator=("steps",))}
    )
    folder = write_experiment(tmp_path, steps=20, endpoints=(endpoint,))
    (result,) = judge(load_experiment(folder))
    assert result.decision.verdict == Verdict.INVALID
    assert "no record has the field t_x_s" in result.decision.reasons[0]
