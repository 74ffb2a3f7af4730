"""The five verdicts, on numbers whose right verdict is known; and how often a verdict is false."""

from __future__ import annotations

import dataclasses

import pytest

from analysis.inference import Comparison, compare_samples, stand_in_sample
from analysis.load import load_experiment
from analysis.plan import ExclusionRules, LostRunRule, Plan, ValidityBounds, freeze
from analysis.verdict import Verdict, decide, judge
from tests.analysis.synthetic import (
    ACCURACY,
    MEGATRON,
    MOLT,
    STEP_TIME,
    TRAINER_TIME,
    write_experiment,
)

SECONDS = STEP_TIME.model_copy(update={"scale": "absolute", "margin": 10.95, "unit": "s"})
LOWER = {"direction": "lower"}


def interval(estimate: float, half_width: float, margin: float = 1.0) -> Comparison:
    """A comparison of 10 and 10 runs whose 95 % interval is estimate +- half_width, made from exact samples."""
    standard_error = half_width / 2.10092  # t(0.975, 18)
    sd = standard_error * 5**0.5
    return compare_samples(
        stand_in_sample(estimate, sd, 10), stand_in_sample(0.0, sd, 10), margin=margin
    )


def endpoint(**changes):
    return ACCURACY.model_copy(update={"margin": 1.0, **changes})


def test_the_published_parity_is_inconclusive_and_takes_about_ten_runs():
    """119.4 +- 2.3 against 109.5 +- 10.3 s a step, n = 3 each, published as "statistically comparable"."""
    comparison = compare_samples(
        stand_in_sample(119.4, 2.3, 3), stand_in_sample(109.5, 10.3, 3), margin=10.95
    )
    decision = decide(SECONDS, comparison)
    assert decision.verdict == Verdict.INCONCLUSIVE
    assert decision.needed.estimate == 10
    assert "needs n = 10 a side, range" in decision.headline


@pytest.mark.parametrize(
    ("estimate", "half_width", "changes", "verdict", "words"),
    [
        (0.0, 0.5, {}, Verdict.EQUIVALENT, "within ±1 accuracy"),
        (0.5, 0.3, {}, Verdict.EQUIVALENT, "a difference of +0.5 is resolved"),
        (2.0, 0.5, {}, Verdict.DIFFERENT, "better"),
        (-2.0, 0.5, {}, Verdict.DIFFERENT, "worse"),
        (-2.0, 0.5, LOWER, Verdict.DIFFERENT, "better"),
        (0.9, 0.5, {}, Verdict.DIFFERENT, "better"),
        (0.5, 1.5, {}, Verdict.INCONCLUSIVE, "needs n ="),
        (0.5, 1.5, {"non_inferiority": True}, Verdict.NON_INFERIOR, "within 1"),
        (0.5, 1.5, {"non_inferiority": True, **LOWER}, Verdict.INCONCLUSIVE, "needs n ="),
        (-0.5, 1.5, {"non_inferiority": True, **LOWER}, Verdict.NON_INFERIOR, "within 1"),
    ],
)
def test_the_verdict_of_an_interval(estimate, half_width, changes, verdict, words):
    decision = decide(endpoint(**changes), interval(estimate, half_width))
    assert decision.verdict == verdict
    assert words in decision.headline


def test_holms_p_and_not_the_raw_one_decides():
    comparison = interval(0.9, 0.8)
    assert decide(endpoint(), comparison).verdict == Verdict.DIFFERENT
    corrected = decide(endpoint(), comparison, p_adjusted=2 * comparison.p_difference)
    assert corrected.verdict == Verdict.INCONCLUSIVE
    assert "Holm" in corrected.reasons[0]
    assert not any("no difference" in reason for reason in corrected.reasons)


def test_a_cap_bars_equivalence_and_not_difference():
    capped = decide(endpoint(), interval(0.0, 0.5), caps=["headroom: at the ceiling"])
    assert capped.verdict == Verdict.INCONCLUSIVE and capped.needed is None
    assert "at the ceiling" in capped.reasons[0]
    assert decide(endpoint(), interval(2.0, 0.5), caps=["x"]).verdict == Verdict.DIFFERENT


def test_needed_runs_are_more_than_there_are():
    decision = decide(endpoint(), interval(0.55, 0.56))
    assert decision.verdict == Verdict.INCONCLUSIVE
    assert decision.needed.estimate == 11
    assert any("near the margin" in reason for reason in decision.reasons)


def test_holm_over_the_declared_primaries_by_hand(sound):
    results = {result.endpoint.name: result for result in judge(load_experiment(sound))}
    raw = {name: result.comparison.p_difference for name, result in results.items()}
    low, high = sorted((ACCURACY.name, TRAINER_TIME.name), key=raw.get)
    assert results[low].p_holm == pytest.approx(min(1.0, 2 * raw[low]))
    assert results[high].p_holm == pytest.approx(min(1.0, max(raw[high], 2 * raw[low])))
    assert results[STEP_TIME.name].p_holm is None


def test_an_invalid_endpoint_takes_no_rejection_from_holms_family(tmp_path):
    def other_machine(system, seed, run):
        run["fingerprints"]["hardware"] = {"cpu": system}

    folder = write_experiment(tmp_path, steps=20, edit_run=other_machine)
    results = {result.endpoint.name: result for result in judge(load_experiment(folder))}
    assert results[TRAINER_TIME.name].decision.verdict == Verdict.INVALID
    raw = results[ACCURACY.name].comparison.p_difference
    assert raw > results[TRAINER_TIME.name].comparison.p_difference
    assert results[ACCURACY.name].p_holm == pytest.approx(min(1.0, 2 * raw))


def test_an_experiment_finds_what_is_true(sound):
    """The arms learn equally (run SD 0.012, margin 0.03); the trainer is 1.5 / 1.8 as slow."""
    verdicts = {result.endpoint.name: result for result in judge(load_experiment(sound))}
    assert verdicts[ACCURACY.name].decision.verdict == Verdict.EQUIVALENT
    assert verdicts[TRAINER_TIME.name].decision.verdict == Verdict.DIFFERENT
    assert verdicts[TRAINER_TIME.name].comparison.estimate == pytest.approx(1.5 / 1.8, abs=0.05)
    assert "molt is better than megatron" in verdicts[TRAINER_TIME.name].may_write


def test_a_sentence_that_may_be_written_says_its_condition(tmp_path):
    plain_layers = TRAINER_TIME.model_copy(update={"condition": "no fused kernel is used."})
    folder = write_experiment(tmp_path, steps=20, endpoints=(plain_layers,))
    (result,) = judge(load_experiment(folder))
    assert result.may_write.endswith("This holds where no fused kernel is used.")


def test_a_claim_of_non_inferiority_is_told_what_non_inferiority_takes():
    """Normal quantiles, one-sided: n = 2 ((1.645 + 0.842) / m)^2 for a margin of m SDs is 49.5 at 0.5; TOST needs 69."""
    margin = {"margin": 0.5 * 4.4721, "non_inferiority": True}
    comparison = compare_samples(
        stand_in_sample(-1.0, 4.4721, 10), stand_in_sample(0.0, 4.4721, 10), margin=margin["margin"]
    )
    one_sided = decide(endpoint(**margin), comparison)
    two_sided = decide(endpoint(margin=margin["margin"]), comparison)
    assert one_sided.verdict == two_sided.verdict == Verdict.INCONCLUSIVE
    assert one_sided.needed.estimate == pytest.approx(50, abs=1)
    assert two_sided.needed.estimate == pytest.approx(69, abs=1)
    assert "one-sided" in one_sided.reasons[0]


def test_without_a_control_no_equality_of_learning_is_claimed(tmp_path):
    folder = write_experiment(tmp_path, steps=20, endpoints=(ACCURACY,), controls=0)
    (result,) = judge(load_experiment(folder))
    assert result.comparison.p_equivalence < 0.05
    assert result.decision.verdict == Verdict.INCONCLUSIVE
    assert "no learning-rate-zero control" in result.decision.reasons[0]


def test_a_control_that_learns_as_much_bars_equality(tmp_path):
    def lucky(system, seed, record):
        if system == "megatron" and "eval_reward_mean" in record and record["step"]:
            record["eval_reward_mean"] = 0.88 + 0.001 * seed

    folder = write_experiment(tmp_path, steps=20, endpoints=(ACCURACY,), edit_record=lucky)
    (result,) = judge(load_experiment(folder))
    assert result.decision.verdict != Verdict.EQUIVALENT
    assert any("no more than the margin above it" in r for r in result.decision.reasons)


def test_two_runs_an_arm_get_no_interval(tmp_path):
    for result in judge(load_experiment(write_experiment(tmp_path, seeds=(0, 1), steps=20))):
        assert result.comparison is None
        assert result.decision.headline == "INCONCLUSIVE (needs n = 3 or more a side)"


def test_one_of_three_runs_missing_leaves_too_few(tmp_path):
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=20, lost={("molt", 2): "oom"})
    assert judge(load_experiment(folder))[0].decision.verdict == Verdict.INCONCLUSIVE


def test_a_margin_changed_after_the_first_result_bars_equivalence(tmp_path):
    tight = ACCURACY.model_copy(update={"margin": 0.001})
    folder = write_experiment(tmp_path, steps=20, endpoints=(tight,))
    frozen = Plan.load(folder / "plan.json")
    freeze(frozen.model_copy(update={"endpoints": (ACCURACY,)}), folder / "plan.json")
    (result,) = judge(load_experiment(folder))
    assert result.comparison.p_equivalence < 0.05
    assert result.decision.verdict == Verdict.INCONCLUSIVE
    assert "changed after 11 runs were done" in result.decision.reasons[0]


def amended(tmp_path, **changes):
    """The one result of an accuracy that is equivalent, after a change of the plan."""
    folder = write_experiment(tmp_path, steps=20, endpoints=(ACCURACY,))
    frozen = Plan.load(folder / "plan.json")
    freeze(frozen.model_copy(update=changes), folder / "plan.json")
    (result,) = judge(load_experiment(folder))
    return result.decision


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pairing_unit", "seed"),
        ("exclusion", ExclusionRules(warmup_steps=3)),
        ("validity", ValidityBounds(kept_fraction=0.1)),
        ("lost_run_rule", LostRunRule(max_lost=2)),
    ],
)
def test_a_rule_changed_after_the_first_result_buys_neither_verdict(tmp_path, key, value):
    """Which steps count and when losses refuse make a difference as easily as an equality."""
    decision = amended(tmp_path, **{key: value})
    assert decision.verdict == Verdict.INVALID
    assert f"post hoc: {key}" in decision.reasons[0]


def test_a_reworded_reason_changes_nothing(tmp_path):
    reworded = ACCURACY.model_copy(update={"margin_reason": "said better"})
    assert amended(tmp_path, endpoints=(reworded,)).verdict == Verdict.EQUIVALENT


@pytest.mark.parametrize(
    "changes",
    [
        {"direction": "lower"},
        {"field": "reward_mean"},
        {"summary": "final_window_mean", "window": 2},
    ],
)
def test_a_measure_changed_after_the_first_result_is_invalid(tmp_path, changes):
    decision = amended(tmp_path, endpoints=(ACCURACY.model_copy(update=changes),))
    assert decision.verdict == Verdict.INVALID
    assert "declared first" in decision.headline


def test_a_level_changed_after_the_first_result_buys_neither_verdict(tmp_path):
    assert amended(tmp_path, alpha=0.01).verdict == Verdict.INVALID


def test_seeds_added_after_results_test_at_a_tenth_of_alpha(tmp_path):
    folder = write_experiment(tmp_path, steps=20)
    before = judge(load_experiment(folder))[0].comparison
    frozen = Plan.load(folder / "plan.json")
    freeze(frozen.model_copy(update={"seeds": (*frozen.seeds, 5)}), folder / "plan.json")
    after = judge(load_experiment(folder))[0].comparison
    assert (before.level, after.level) == (0.95, pytest.approx(0.995))
    assert after.ci_low < before.ci_low and after.ci_high > before.ci_high


def test_unequal_spreads_and_few_runs_are_cautioned(tmp_path):
    arms = {
        "molt": dataclasses.replace(MOLT, accuracy_sd=0.001),
        "megatron": dataclasses.replace(MEGATRON, accuracy_sd=0.05),
    }
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=20, arms=arms)
    cautions = " ".join(judge(load_experiment(folder))[0].cautions)
    assert "spreads differ" in cautions and "n = 3" in cautions and "power" in cautions


def test_a_run_that_decides_alone_is_named(tmp_path):
    def outlier(system, seed, record):
        if (system, seed, record["step"]) == ("molt", 2, 20):
            record["eval_reward_mean"] = 0.6

    folder = write_experiment(tmp_path, steps=20, edit_record=outlier, random_seed=1)
    cautions = " ".join(judge(load_experiment(folder))[0].cautions)
    assert "without molt seed 2" in cautions and "EQUIVALENT" in cautions
