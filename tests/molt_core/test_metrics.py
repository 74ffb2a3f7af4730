"""What a figure of the record is a mean over: tokens, rollouts, groups or segments, by numbers worked by hand."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from molt_core import metrics
from molt_core.metrics import RunWriter
from molt_core.train.critic import CriticResult
from molt_core.train.results import ProbeResult, StepResult
from molt_core.types import Batch, Group, Rollout
from tests.molt_core.make import group, trajectory


def step_result(**sums: float) -> StepResult:
    base = {
        "tokens": 10,
        "tokens_forward": 40,
        "tokens_kept": 8,
        "loss": -0.5,
        "importance_weight": 6.0,
        "importance_weight_squared": 4.5,
    }
    return StepResult(base | sums, 2.0, True, 0.1, 0.2, 0.0, 1.0)


def test_the_objective_s_figures_are_means_over_action_tokens():
    found = metrics.training(
        step_result(entropy=20.0, kl=0.5, clip_fraction=3.0, importance_ratio=11.0), clip_norm=1.0
    )
    assert found["entropy"] == 2.0
    assert found["kl"] == 0.05
    assert found["clip_fraction"] == 0.3
    assert found["importance_ratio"] == 1.1
    assert found["importance_weight"] == 0.6
    # (sum w)^2 / (N sum w^2) = 36 / 45.
    assert found["effective_sample_fraction"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    "name",
    [
        *("importance_truncated", "importance_clipped", "importance_masked", "kl_reference"),
        *("clip_fraction", "clip_fraction_low", "dual_clip_fraction", "my_own_indicator"),
    ],
)
def test_what_a_loss_or_a_correction_says_of_each_token_is_a_mean_over_all_of_them(name):
    # 3 of 10 sampled tokens; those that were not kept count as well.
    assert metrics.training(step_result(**{name: 3.0}), clip_norm=1.0)[name] == 0.3


def test_books_are_counts_and_kept_groups_a_share_of_the_finished_ones():
    # Of 10 groups 2 are being generated; of the 8 finished ones 2 were dropped, 4 trained, and 2 wait.
    pool = SimpleNamespace(
        tokens=SimpleNamespace(generated=90, trained=50, dropped={"agent_error": 15}),
        groups=SimpleNamespace(generated=10, trained=4, dropped={"agent_error": 2}),
        tokens_in_flight=25,
        running=[8, 9],
        finished=[6, 7],
    )
    assert metrics.books(pool) == {
        "tokens_generated": 90,
        "tokens_trained": 50,
        "tokens_dropped": {"agent_error": 15},
        "tokens_in_flight": 25,
        "groups_generated": 10,
        "groups_trained": 4,
        "groups_dropped": {"agent_error": 2},
        "groups_in_flight": 4,
        "kept_fraction": 0.75,
    }


def test_the_critic_s_clipped_values_are_a_mean_over_tokens_and_its_loss_and_norm_are_not():
    sums = {"tokens": 8, "value_loss": 0.5, "value_clip_fraction": 2.0}
    result = replace(step_result(), critic=CriticResult(sums, 3.0, 0, 0.75), critic_s=1.5)
    found = metrics.training(result, clip_norm=1.0)
    assert (found["value_loss"], found["critic_grad_norm"]) == (0.5, 3.0)
    assert (found["value_clip_fraction"], found["explained_variance"]) == (0.25, 0.75)
    assert found["t_critic_s"] == 1.5
    bare = CriticResult({"tokens": 8, "value_loss": 0.5}, 3.0, 0, None)
    assert metrics.critic(bare) == {"value_loss": 0.5, "critic_grad_norm": 3.0}
    assert not {k for k in metrics.training(step_result(), 1.0) if "value" in k or "critic" in k}


def test_loss_norm_and_counts_are_no_means():
    found = metrics.training(step_result(), clip_norm=3.0)
    assert (found["loss"], found["grad_norm"], found["grad_clipped"]) == (-0.5, 2.0, 0.0)
    assert (found["tokens_forward"], found["tokens_kept"], found["stepped"]) == (40, 8, 1)
    assert metrics.training(step_result(), clip_norm=1.0)["grad_clipped"] == 1.0


def test_a_loss_that_clips_nothing_records_no_clip_fraction():
    assert not {k for k in metrics.training(step_result(), 1.0) if k.startswith("clip")}


def test_lag_counts_action_tokens():
    found = metrics.lag(np.array([0, 0, 0, 1, 2, 1]))
    assert found == {
        "lag_mean": pytest.approx(4 / 6),
        "lag_max": 2,
        "lag_histogram": {"0": 3, "1": 2, "2": 1},
    }


def test_lengths_are_per_rollout_and_per_segment():
    # Rollouts of 2 + 1 and of 6 action tokens; segments of 4 + 2, 4 + 1 and 4 + 6 tokens.
    rollouts = (
        Rollout("a", (trajectory(actions=2), trajectory(actions=1)), 1.0),
        Rollout("b", (trajectory(actions=6),), 1.0),
    )
    found = metrics.batch(Batch((Group("p", 0, rollouts, 9, 0), group(1)), version=0))
    assert found["tokens_batch"] == 9 + 2 * 4
    assert found["trained_tokens_max"] == 6
    assert found["segments_mean"] == 5 / 4
    assert found["context_tokens_mean"] == pytest.approx((6 + 5 + 10 + 8 + 8) / 5)
    assert found["context_tokens_max"] == 10
    assert found["groups_zero_variance"] == 1


def test_tokens_across_a_refit_are_those_of_a_newer_version_than_their_segment_s_first():
    row = trajectory(actions=3)
    versions = row.versions.copy()
    versions[-2:] = 1
    torn = replace(group(0), rollouts=(Rollout("a", (replace(row, versions=versions),), 0.0),))
    assert metrics.batch(Batch((torn,), 1))["tokens_across_refit"] == 2


def test_rewards_and_lengths_weigh_each_rollout_once_and_leave_out_the_failed():
    # Three good rollouts: one of two segments (2 + 1 tokens, cut off), two of 3; one failed.
    sums = metrics.RewardSums()
    segments = trajectory(actions=2), trajectory(actions=1)
    first = Rollout("a", segments, 4.0, truncated=True)
    sums.add(Group("p", 0, (first,), 3, 0))
    sums.add(group(3, rewards=(1.0, 1.0)))
    sums.add(group(0, rewards=(9.0,), status="agent_error"))
    assert sums.take() == {
        "reward_mean": 2.0,
        "reward_std": pytest.approx(math.sqrt(3)),
        "response_tokens_mean": 3.0,
        "truncated_fraction": pytest.approx(1 / 3),
        "rollouts": 3,
    }
    assert sums.take() == {}


def test_the_deviation_of_one_reward_is_absent():
    sums = metrics.RewardSums()
    sums.add(group(0, rewards=(1.0,)))
    assert sums.take().keys() & {"reward_mean", "reward_std"} == {"reward_mean"}


def test_a_tie_leaves_out_only_the_tokens_that_it_may_explain():
    """A tie in the template takes every row: most of them agree all the same, and stay in the count."""
    differences = np.array([1e-7, 2e-7, 3e-2, 4e-2, 5e-6])
    tied = np.array([False, True, True, False, True])
    found = ProbeResult.of(differences, tied, doubt_above=1e-5)
    assert found.differences.tolist() == [1e-7, 2e-7, 4e-2, 5e-6]
    assert found.tied == 1


def test_a_tie_explains_no_difference_that_is_no_number():
    found = ProbeResult.of(np.array([math.inf, math.nan]), np.array([True, True]), doubt_above=0)
    assert (len(found.differences), found.tied) == (2, 0)


def test_the_probe_s_figures_are_over_tokens_that_are_not_tied():
    found = metrics.probe(ProbeResult(np.array([0.0, 1e-6, 3e-6], np.float32), tied=5))
    assert (found["mismatch_tokens"], found["tokens_router_tied"]) == (3, 5)
    assert found["mismatch_mean"] == pytest.approx(4e-6 / 3)
    assert found["mismatch_max"] == pytest.approx(3e-6)
    assert metrics.probe(ProbeResult(np.zeros(0, np.float32), 2)) == {
        "mismatch_tokens": 0,
        "tokens_router_tied": 2,
    }


def test_a_held_out_item_that_failed_counts_as_reward_zero():
    rollouts = [Rollout("a", (trajectory(),), 1.0), Rollout("b", (), 7.0, status="agent_error")]
    found = metrics.evaluation(rollouts, seconds=2.0)
    assert (found["eval_reward_mean"], found["eval_items"], found["eval_failed"]) == (0.5, 2, 1)
    assert found["eval_reward_stderr"] == pytest.approx(0.5)
    assert (found["eval_tokens"], found["t_eval_s"]) == (trajectory().action_tokens, 2.0)


def test_overlap_counts_a_moment_once_however_many_engines_decode():
    assert metrics.overlap_s([(0, 4), (2, 6), (9, 20)], started=1.0, ended=10.0) == 6.0


def test_a_killed_writer_s_half_line_is_not_glued_to_the_next_record(tmp_path):
    RunWriter(tmp_path, 1, 5).record({"step": 1})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "attem')
    RunWriter(tmp_path, 2, 5).record({"step": 2})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["attempt"]) for line in lines] == [(1, 1), (2, 2)]


def test_the_mean_reward_does_not_depend_on_the_order_of_arrival():
    """0.1 + 0.2 + 0.3 is another float than 0.3 + 0.2 + 0.1."""
    means = []
    for order in ((0, 1, 2), (2, 1, 0)):
        sums = metrics.RewardSums()
        for index in order:
            sums.add(group(index, rewards=((0.1, 0.2, 0.3)[index],)))
        means.append(sums.take()["reward_mean"])
    assert means[0] == means[1]
