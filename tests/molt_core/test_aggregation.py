"""The weight of a sampled token, by hand for each aggregation, and that no layout can change it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_core.algo.aggregation import AGGREGATIONS, weighted_rollouts
from molt_core.algo.config import AlgorithmConfig, KLConfig
from molt_core.types import Batch, Group, Rollout
from tests.molt_core.make import group, trajectory


def config(name: str) -> AlgorithmConfig:
    return AlgorithmConfig(aggregation=name, aggregation_length=10 if name == "constant" else None)


def batch() -> Batch:
    """Prompt p: rollouts of 2 + 1 (two segments) and 1 tokens. Prompt q: one rollout of 4."""
    p = (
        Rollout("a", (trajectory(actions=2), trajectory(actions=1)), 1.0),
        Rollout("b", (trajectory(actions=1),), 0.0),
    )
    q = (Rollout("c", (trajectory(actions=4),), 1.0),)
    return Batch((Group("p", 0, p, 4, 0), Group("q", 1, q, 4, 0)), version=0)


@pytest.mark.parametrize(
    ("name", "a", "b", "c"),
    [
        ("token_mean", 1 / 8, 1 / 8, 1 / 8),  # 8 tokens
        ("sequence_mean", 1 / 9, 1 / 3, 1 / 12),  # 3 rollouts of 3, 1 and 4 tokens
        ("prompt_mean", 1 / 8, 1 / 8, 1 / 8),  # 2 prompts of 4 tokens each
        ("constant", 1 / 30, 1 / 30, 1 / 30),  # 3 rollouts, length 10
    ],
)
def test_weights_by_hand(name, a, b, c):
    rollouts = weighted_rollouts(batch(), config(name))
    found = [weight for rollout in rollouts for weight in rollout.weights]
    assert found == pytest.approx([a] * 3 + [b] + [c] * 4)


def test_prompt_mean_gives_a_prompt_of_few_tokens_as_much_as_one_of_many():
    # Without rollout b: prompt p has 3 tokens, q 4; each prompt weighs 1/2.
    left = batch()
    lost = replace(left.groups[0], rollouts=left.groups[0].rollouts[:1])
    rollouts = weighted_rollouts(Batch((lost, left.groups[1]), 0), config("prompt_mean"))
    assert [r.weights[0] for r in rollouts] == pytest.approx([1 / 6, 1 / 8])


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6), seed=st.integers(0, 9))
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_the_order_of_rollouts_and_groups_does_not_matter(name, sizes, seed):
    sizes[0] += 1
    groups = tuple(
        Group(
            f"p{g}",
            g,
            tuple(Rollout(f"{g}/{n}", (trajectory(actions=n + 1),), 0.0) for n in range(size)),
            0,
            0,
        )
        for g, size in enumerate(sizes)
    )
    rng = np.random.default_rng(seed)
    shuffled = tuple(
        replace(groups[g], rollouts=tuple(rng.permutation(np.array(groups[g].rollouts))))
        for g in rng.permutation(len(groups))
    )

    def by_rollout(groups) -> dict[str, float]:
        found = Batch(groups, 0)
        weighted = weighted_rollouts(found, config(name))
        return {r.rollout_id: w.weights[0] for r, w in zip(found.rollouts, weighted)}

    straight = by_rollout(groups)
    assert by_rollout(shuffled) == pytest.approx(straight)


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "prompt_mean"])
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_a_mean_s_weights_sum_to_one(name, lengths):
    rollouts = tuple(Rollout(str(i), (trajectory(actions=n),), 0.0) for i, n in enumerate(lengths))
    weighted = weighted_rollouts(Batch((Group("p", 0, rollouts, 0, 0),), 0), config(name))
    assert sum(float(r.weights.sum()) for r in weighted) == pytest.approx(1, rel=1e-5)


def test_a_rollout_without_a_sampled_token_counts_for_no_mean():
    whole = group(0, rewards=(0.0, 1.0))
    empty = Rollout("empty", (trajectory(actions=0),), 0.0)
    with_empty = replace(whole, rollouts=(*whole.rollouts, empty))
    for name in AGGREGATIONS:
        plain = weighted_rollouts(Batch((whole,), 0), config(name))
        found = weighted_rollouts(Batch((with_empty,), 0), config(name))
        assert [r.weights.tolist() for r in found[:2]] == [r.weights.tolist() for r in plain]
        assert found[2].weights.shape == (0,)


def test_reference_log_probabilities_go_to_their_rollouts():
    with_kl = AlgorithmConfig(kl=KLConfig(coef=0.1))
    reference = np.arange(8, dtype=np.float32)
    rollouts = weighted_rollouts(batch(), with_kl, {"reference": reference})
    assert [r.reference_logprobs.tolist() for r in rollouts] == [[0, 1, 2], [3], [4, 5, 6, 7]]


def test_weights_are_whole_batch_numbers_in_float32():
    (first, *_) = weighted_rollouts(batch(), config("sequence_mean"))
    assert first.weights.dtype == np.float32
    assert torch.from_numpy(first.weights).sum().item() == pytest.approx(1 / 3)
