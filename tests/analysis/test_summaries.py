"""One number a run, by hand."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.endpoint import Endpoint, Rate
from analysis.load import FINISHED, RunRecord
from analysis.plan import ExclusionRules
from analysis.summaries import SummaryError, initial_value, mean_over_steps, summarise

NO_RULES = ExclusionRules(warmup_steps=0, after_resume_steps=0)


def run_of(**columns) -> RunRecord:
    steps = columns.pop("steps", range(1, 1 + len(next(iter(columns.values())))))
    frame = pd.DataFrame(columns, index=pd.Index(list(steps), name="step"))
    return RunRecord("run", "molt", 0, "id", FINISHED, "", {}, frame)


def endpoint(field, summary, **more) -> Endpoint:
    return Endpoint(
        name="x", field=field, summary=summary, unit="u", direction="higher", margin=0.1,
        margin_reason="r", scale="absolute", **more,
    )  # fmt: skip


def test_at_last_step():
    assert summarise(endpoint("a", "at_last_step"), run_of(a=[1.0, 2.0, 5.0]), NO_RULES) == 5.0


def test_at_last_step_is_not_the_latest_value_there_happens_to_be():
    with pytest.raises(SummaryError, match="missing at the last step 3; latest at step 2"):
        summarise(endpoint("a", "at_last_step"), run_of(a=[1.0, 2.0, None], b=[1, 1, 1]), NO_RULES)


def test_final_window_mean():
    run = run_of(a=[9.0, 1.0, 2.0, 6.0])
    assert summarise(endpoint("a", "final_window_mean", window=3), run, NO_RULES) == 3.0


def test_auc_is_the_mean_height_over_steps():
    """(1 to 3 over 2 steps: area 4) + (3 to 3 over 8 steps: area 24) = 28 over 10 steps."""
    run = run_of(a=[1.0, 3.0, 3.0], steps=[0, 2, 10])
    assert summarise(endpoint("a", "auc"), run, NO_RULES) == pytest.approx(2.8)


def test_total_rate_is_total_over_total_and_not_a_mean_of_ratios():
    rate = Rate(numerator=("t_a_s", "t_b_s"), denominator=("tokens",))
    run = run_of(t_a_s=[1.0, 1.0], t_b_s=[1.0, 3.0], tokens=[10, 90])
    assert summarise(endpoint(rate, "total_rate"), run, NO_RULES) == pytest.approx(6 / 100)


def test_total_rate_can_count_steps_and_skips_the_warm_up():
    rate = Rate(numerator=("wall_s",), denominator=("steps",))
    rules = ExclusionRules(warmup_steps=1, after_resume_steps=0)
    run = run_of(wall_s=[50.0, 1.0, 2.0])
    assert summarise(endpoint(rate, "total_rate"), run, rules) == pytest.approx(1.5)


def test_total_rate_refuses_a_step_without_the_field():
    rate = Rate(numerator=("wall_s",), denominator=("steps",))
    with pytest.raises(SummaryError, match="wall_s is missing at step 2"):
        summarise(endpoint(rate, "total_rate"), run_of(wall_s=[1.0, None, 2.0]), NO_RULES)


def test_an_absent_field_is_named_with_its_run():
    with pytest.raises(SummaryError, match="run: no record has the field b"):
        summarise(endpoint("b", "at_last_step"), run_of(a=[1.0]), NO_RULES)


def test_a_field_that_is_null_in_every_record_is_named_with_its_run():
    with pytest.raises(SummaryError, match="run: a is null in every record"):
        summarise(endpoint("a", "at_last_step"), run_of(a=[None, None]), NO_RULES)


def test_the_initial_value_is_the_first_record():
    assert initial_value(endpoint("a", "at_last_step"), run_of(a=[0.2, 0.9], steps=[0, 5])) == 0.2


def test_a_part_that_few_steps_have_is_spread_over_all_of_them():
    metrics = pd.DataFrame({"t_eval_s": [None, None, 3.0, None], "wall_s": [1.0, 1.0, 4.0, 1.0]})
    assert mean_over_steps(metrics, "t_eval_s") == 3.0 / 4
    assert mean_over_steps(metrics, "t_checkpoint_s") == 0.0
