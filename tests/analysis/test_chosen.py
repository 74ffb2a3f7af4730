"""Ways to a verdict that the runs do not support: each was open once, and must stay shut."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest

from analysis.endpoint import Rate
from analysis.load import load_experiment
from analysis.paper_rows import throughput_rows
from analysis.plan import Arm, Plan, PlannedRun, freeze
from analysis.verdict import Verdict, judge
from tests.analysis.synthetic import (
    ACCURACY,
    MEGATRON,
    MOLT,
    STEP_TIME,
    TRAINER_TIME,
    write_experiment,
)


def amend(folder, **changes):
    """Freeze the plan again with ``changes``; returns what stands then."""
    path = folder / "plan.json"
    return freeze(Plan.load(path).model_copy(update=changes), path)


def result_of(folder, name=ACCURACY.name):
    return next(r for r in judge(load_experiment(folder)) if r.endpoint.name == name)


def failed(result, check):
    return next(c for c in result.measurement.checks if c.name == check)


# The plan


def test_results_taken_out_of_the_plan_leave_no_verdict(tmp_path):
    folder = write_experiment(tmp_path, steps=10, seeds=(0, 1, 2, 3, 4))
    plan = Plan.load(folder / "plan.json")
    kept = {n: r for n, r in plan.identities.items() if r.purpose != "replicate" or r.seed != 3}
    amend(folder, seeds=(0, 1, 2, 4), identities=kept, order=tuple(kept))
    result = result_of(folder)
    assert result.decision.verdict == Verdict.INVALID
    assert "molt-s3" in failed(result, "no result removed").found


def test_a_run_that_is_replaced_is_another_look_and_no_removal(tmp_path):
    folder = write_experiment(tmp_path, steps=10)
    plan = Plan.load(folder / "plan.json")
    old = next(n for n, r in plan.identities.items() if (r.system, r.seed) == ("molt", 3))
    kept = {n: r for n, r in plan.identities.items() if n != old}
    kept["molt-s3-new"] = PlannedRun(system="molt", seed=3, identity="f" * 64)
    amended = amend(folder, identities=kept, order=tuple(kept))
    assert amended.removed_late == {} and amended.looks == 2


def test_a_plan_written_when_runs_had_records_supports_nothing(tmp_path):
    folder = write_experiment(tmp_path, steps=10)
    plan = Plan.load(folder / "plan.json")
    (folder / "plan.json").unlink()
    freeze(plan, folder / "plan.json")
    result = result_of(folder)
    assert result.decision.verdict == Verdict.INVALID
    assert (
        "plan changed after 11 runs were done"
        in failed(result, f"{ACCURACY.name} declared first").found
    )


def test_a_plan_edited_by_hand_is_not_the_one_the_runs_began_under(tmp_path):
    folder = write_experiment(tmp_path, steps=10)
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text.replace('"margin": 0.03', '"margin": 0.3'))
    result = result_of(folder)
    assert result.decision.verdict == Verdict.INVALID
    assert "began under another plan" in failed(result, "plan as frozen").found


def test_runs_that_began_under_an_amended_plan_are_known_by_its_digest(tmp_path):
    folder = write_experiment(tmp_path, steps=10)
    amend(
        folder,
        endpoints=(
            ACCURACY.model_copy(update={"margin_reason": "said better"}),
            TRAINER_TIME,
            STEP_TIME,
        ),
    )
    assert failed(result_of(folder), "plan as frozen").passed


def test_a_digest_does_not_change_with_a_key_that_is_left_at_its_default(tmp_path):
    """A later version's new key has a default: plans of before must keep their hash."""
    plan = Plan.load(write_experiment(tmp_path, steps=2) / "plan.json")
    assert plan.model_copy(update={"switch": None}).digest == plan.digest
    assert plan.model_copy(update={"switch": "optimizer.lr"}).digest != plan.digest


@pytest.mark.parametrize(
    "endpoints",
    [
        (ACCURACY.model_copy(update={"primary": False}), TRAINER_TIME, STEP_TIME),
        (TRAINER_TIME, STEP_TIME),
    ],
    ids=["demoted", "dropped"],
)
def test_a_primary_that_goes_leaves_holms_family_as_large_as_it_was(tmp_path, endpoints):
    folder = write_experiment(tmp_path, steps=10)
    before = result_of(folder, TRAINER_TIME.name)
    amend(folder, endpoints=endpoints)
    after = result_of(folder, TRAINER_TIME.name)
    raw = after.comparison.p_difference
    assert after.p_holm == pytest.approx(2 * raw) == before.p_holm


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"switch": "optimizer.lr"}, "switch"),
        (
            {"arms": (Arm(name="molt", role="baseline"), Arm(name="megatron", role="candidate"))},
            "arms.molt.role",
        ),
    ],
)
def test_switch_and_roles_are_declared_first(tmp_path, changes, key):
    folder = write_experiment(tmp_path, steps=10)
    amend(folder, **changes)
    result = result_of(folder)
    assert result.decision.verdict == Verdict.INVALID
    assert key in failed(result, f"{ACCURACY.name} declared first").found


def test_a_condition_may_be_added_late_and_not_dropped(tmp_path):
    narrow = ACCURACY.model_copy(update={"condition": "no fused kernel is used"})
    added = write_experiment(tmp_path / "added", steps=20, endpoints=(ACCURACY,))
    amend(added, endpoints=(narrow,))
    assert result_of(added).decision.verdict == Verdict.EQUIVALENT
    assert "no fused kernel" in result_of(added).may_write
    dropped = write_experiment(tmp_path / "dropped", steps=20, endpoints=(narrow,))
    amend(dropped, endpoints=(ACCURACY,))
    assert result_of(dropped).decision.verdict == Verdict.INVALID


def test_a_plan_has_one_run_of_an_arm_and_a_seed(tmp_path):
    plan = Plan.load(write_experiment(tmp_path, steps=2) / "plan.json")
    twice = PlannedRun(system="molt", seed=0, identity="e" * 64)
    content = plan.model_dump() | {"identities": {**plan.identities, "again": twice}}
    with pytest.raises(ValueError, match="molt with seed 0 appears more than once"):
        Plan.model_validate(content)


def test_seeds_without_a_run_are_not_forgotten(tmp_path):
    folder = write_experiment(tmp_path, steps=10)
    amend(folder, seeds=(0, 1, 2, 3, 4, 5))
    assert "6 seeds and 5 runs" in failed(result_of(folder), "run accounting").found


# What guards an equality


def test_without_a_ceiling_no_equality_of_learning_is_claimed(tmp_path):
    verdicts = {}
    for ceiling in (1.0, None, "unbounded"):
        endpoint = ACCURACY.model_copy(update={"ceiling": ceiling})
        folder = write_experiment(tmp_path / str(ceiling), steps=20, endpoints=(endpoint,))
        verdicts[ceiling] = result_of(folder).decision.verdict
    assert verdicts == {
        1.0: Verdict.EQUIVALENT,
        None: Verdict.INCONCLUSIVE,
        "unbounded": Verdict.EQUIVALENT,
    }


@pytest.mark.parametrize(
    ("quantity", "verdict"), [(None, Verdict.INCONCLUSIVE), ("other", Verdict.EQUIVALENT)]
)
def test_a_field_of_unknown_kind_is_equal_only_where_that_is_declared(tmp_path, quantity, verdict):
    def passes(system, seed, record):
        record["pass_rate"] = 0.42 + 0.001 * (seed % 3)

    endpoint = ACCURACY.model_copy(update={"field": "pass_rate", "quantity": quantity})
    folder = write_experiment(tmp_path, steps=20, endpoints=(endpoint,), edit_record=passes)
    result = result_of(folder)
    assert result.decision.verdict == verdict
    assert failed(result, f"what {ACCURACY.name} measures").passed is False


def test_a_field_declared_to_be_learning_is_guarded_as_learning(tmp_path):
    def passes(system, seed, record):
        record["pass_rate"] = 0.42 + 0.001 * (seed % 3)

    endpoint = ACCURACY.model_copy(update={"field": "pass_rate", "quantity": "learning"})
    folder = write_experiment(tmp_path, steps=20, endpoints=(endpoint,), edit_record=passes)
    assert result_of(folder).decision.headline.startswith("INVALID (held-out accuracy was learned")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda run: run["config"]["optimizer"].update(lr=1e-3), "its learning rate is not 0"),
        (
            lambda run: run["config"]["task"].update(variant={"ask": "size"}),
            "task.variant.ask differs",
        ),
        (lambda run: run.update(warmup_content_hash="other"), "it began from another checkpoint"),
        (lambda run: run["fingerprints"].update(code="other"), "it ran other code"),
    ],
)
def test_a_control_that_is_none_guards_nothing(tmp_path, edit, words):
    folder = write_experiment(tmp_path, steps=20, endpoints=(ACCURACY,))
    (about,) = folder.glob("megatron-control-*/run.json")
    run = json.loads(about.read_text())
    edit(run)
    about.write_text(json.dumps(run))
    result = result_of(folder)
    assert result.decision.verdict == Verdict.INCONCLUSIVE
    assert words in failed(result, f"control of {ACCURACY.name}").found


def test_a_shorter_control_guards_nothing(tmp_path):
    folder = write_experiment(tmp_path, steps=20, endpoints=(ACCURACY,))
    (metrics,) = folder.glob("megatron-control-*/metrics.jsonl")
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:11]))
    assert "another length" in failed(result_of(folder), f"control of {ACCURACY.name}").found


def test_waiting_that_was_not_recorded_at_every_step_is_unverified(tmp_path):
    def forgets(system, seed, record):
        if record["step"] > 6:
            record.pop("t_wait_s", None)

    arms = {"molt": replace(MOLT, wait_share=0.8), "megatron": replace(MEGATRON, wait_share=0.8)}
    folder = write_experiment(tmp_path, steps=20, arms=arms, edit_record=forgets)
    check = failed(result_of(folder, STEP_TIME.name), f"waiting in {STEP_TIME.name}")
    assert check.passed is None and check.caps


# The numbers


@pytest.mark.parametrize("field", ["tokens_trained", "groups_trained"])
def test_a_rate_takes_a_counter_apart(tmp_path, field):
    """200 tokens and 8 groups a step, over exactly 2 s a step."""

    def steadily(system, seed, record):
        record["wall_s"] = 2.0 + 1e-3 * seed

    rate = Rate(numerator=(field,), denominator=("wall_s",))
    endpoint = STEP_TIME.model_copy(update={"field": rate, "primary": True})
    folder = write_experiment(tmp_path, steps=20, endpoints=(endpoint,), edit_record=steadily)
    each = {"tokens_trained": 200, "groups_trained": 8}[field]
    assert result_of(folder, endpoint.name).measurement.values["molt"][0] == pytest.approx(each / 2)


@pytest.mark.parametrize(
    "summary", [{"summary": "auc"}, {"summary": "final_window_mean", "window": 2}]
)
def test_arms_recorded_at_other_steps_are_not_compared(tmp_path, summary):
    def rarely(system, seed, record):
        if system == "molt" and record["step"] not in (0, 30, 60):
            record.pop("eval_reward_mean", None)

    endpoint = ACCURACY.model_copy(update=summary)
    folder = write_experiment(tmp_path, steps=60, endpoints=(endpoint,), edit_record=rarely)
    result = result_of(folder)
    assert result.decision.verdict == Verdict.INVALID
    assert (
        "step 10 is in some and not in all" in failed(result, f"records of {ACCURACY.name}").found
    )


def test_values_that_differ_by_rounding_are_identical(tmp_path):
    def summed(system, seed, record):
        if record["step"] == 20:
            record["eval_reward_mean"] = 0.1 + 0.2 + 0.4 if seed % 2 else 0.7

    folder = write_experiment(tmp_path, steps=20, endpoints=(ACCURACY,), edit_record=summed)
    values = result_of(folder).measurement.values["molt"]
    assert 0 < max(values.values()) - min(values.values()) < 1e-12
    result = result_of(folder)
    assert result.decision.verdict == Verdict.INVALID
    assert failed(result, f"resolution of {ACCURACY.name}").refuses


# The sentences


def test_a_checkpoint_that_was_not_compared_is_not_called_one(tmp_path):
    forget = {"edit_run": lambda system, seed, run: run.pop("warmup_content_hash")}
    folder = write_experiment(tmp_path, steps=20, **forget)
    assert "one initial checkpoint" not in result_of(folder, TRAINER_TIME.name).may_write


def take_end(folder, pattern, age_s):
    for run in folder.glob(pattern):
        (run / "done.json").unlink()
        (run / "attempts/01/end.json").unlink()
        then = time.time() - age_s
        for path in (run / "attempts/01", run / "heartbeat.json"):
            os.utime(path, (then, then))


def test_no_verdict_while_a_run_is_at_work(tmp_path):
    folder = write_experiment(tmp_path, steps=20)
    take_end(folder, "molt-s4-*", age_s=30)
    for result in judge(load_experiment(folder)):
        assert result.decision.headline == "INCONCLUSIVE (1 planned run has not ended)"
        assert "molt-s4" in result.decision.reasons[0]


def test_a_run_whose_heart_stopped_long_ago_is_lost(tmp_path):
    folder = write_experiment(tmp_path, steps=20)
    take_end(folder, "molt-s4-*", age_s=3600)
    result = result_of(folder)
    assert result.decision.verdict == Verdict.EQUIVALENT
    assert "molt 4 of 5" in result.may_write


def test_a_run_that_never_started_is_waited_for(tmp_path):
    folder = write_experiment(tmp_path, steps=20, absent=(("molt", 4),))
    assert result_of(folder).decision.headline == "INCONCLUSIVE (1 planned run has not ended)"


def test_a_table_withholds_the_numbers_of_an_invalid_comparison(tmp_path):
    def gated(system, seed, record):
        if record["step"]:
            record["kept_fraction"] = 0.0

    definition = {"name": "moe_vl", "published": PUBLISHED}
    for name, edit, shown in (("sound", None, False), ("gated", gated, True)):
        write_experiment(tmp_path / name, steps=20, edit_record=edit)
        rows, _ = throughput_rows(definition, tmp_path / name)
        assert ("INVALID" in rows[0][-1]) is shown
        assert (rows[0][1] == "\u2013") is shown


PUBLISHED = {
    "rows": [
        {"system": n, "step_s": s, "step_sd": 2.0, "n": 3, "tokens_per_device_s": 100}
        for n, s in (("a", 100.0), ("b", 110.0))
    ],
    "baseline": "b",
    "devices": 16,
    "tokens_per_step": 160000,
}
