"""One trainer rank on the built-in policy, without engine or Ray: what is stepped on, what is not, and what stays frozen."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch

from molt_core.algo.aggregation import WeightedRollout, weighted_rollouts
from molt_core.config import RunConfig
from molt_core.train.critic import CriticGroup
from molt_core.train.fsdp2 import FSDP2Model
from molt_core.train.objective import row_logprobs
from molt_core.train.results import StepResult
from molt_core.train.split import shares
from molt_core.train.worker import TrainerGroup, TrainerRank
from molt_core.types import Batch, ContractError, Group, NotFinite, Rollout
from tests.harness.trainer_cases import (
    given_out,
    rescaled_checkpoint,
    trajectories,
)
from tests.molt_core.make import weighted


def batch(checkpoint: Path) -> Batch:
    """Two groups of three rollouts; rewards by whether the first sampled id is even."""
    rows = trajectories(checkpoint, (1, 0, 2, 1, 0))
    rollouts = [
        Rollout(str(n), (row,), float(row.token_ids[row.action_mask][0] % 2 == 0))
        for n, row in enumerate(rows)
    ]
    return Batch(
        (Group("p", 0, tuple(rollouts[:3]), 0, 0), Group("q", 1, tuple(rollouts[3:]), 0, 0)), 0
    )


def on_policy(rank: TrainerRank, batch: Batch) -> Batch:
    """The batch with the log-probabilities that the rank's own policy has for it now."""

    def relabelled(row):
        logprobs = np.zeros(len(row.token_ids), np.float32)
        (logprobs[row.action_mask],) = row_logprobs(rank.backend, [row], rank.distribution)
        return replace(row, logprobs=logprobs)

    groups = [
        replace(
            group,
            rollouts=tuple(
                replace(r, segments=tuple(map(relabelled, r.segments))) for r in group.rollouts
            ),
        )
        for group in batch.groups
    ]
    return replace(batch, groups=tuple(groups))


def logprobs(rank: TrainerRank, batch: Batch) -> dict[str, np.ndarray]:
    rows = [segment for group in batch.groups for segment in group.segments]
    found = rank.logprobs([rows[:2], rows[2:]], rank.config.algorithm.scored_policies)
    return {name: np.concatenate(values) for name, values in found.items()}


def rollouts_of(rank: TrainerRank, batch: Batch) -> list[WeightedRollout]:
    return weighted_rollouts(batch, rank.config.algorithm, logprobs(rank, batch))


def score_of(rank: TrainerRank, batch: Batch) -> np.ndarray:
    rows = [segment for group in batch.groups for segment in group.segments]
    return np.concatenate(row_logprobs(rank.backend, rows, rank.distribution))


def step(rank: TrainerRank, rollouts: list[WeightedRollout]):
    return rank.step(shares(rollouts, 1, rank.config.trainer)[0], rank.config.algorithm)


def weights(rank: TrainerRank) -> dict[str, torch.Tensor]:
    return given_out(rank.backend)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def with_nan(rollouts: list[WeightedRollout]) -> list[WeightedRollout]:
    spoilt = np.full_like(rollouts[0].advantages, math.nan)
    return [rollouts[0]._replace(advantages=spoilt), *rollouts[1:]]


def without_signal(rollouts: list[WeightedRollout]) -> list[WeightedRollout]:
    return [r._replace(advantages=np.zeros_like(r.advantages)) for r in rollouts]


@pytest.mark.parametrize(
    ("spoil", "norm"),
    [(with_nan, math.nan), (without_signal, 0.0)],
    ids=["not finite", "no signal"],
)
def test_a_batch_that_cannot_be_stepped_on_leaves_weights_and_optimiser_as_they_were(
    start, tiny_checkpoint, spoil, norm
):
    rank = start()
    rollouts = rollouts_of(rank, batch(tiny_checkpoint))
    assert step(rank, rollouts).stepped
    after_one = weights(rank)
    result = step(rank, spoil(rollouts))
    assert not result.stepped and result.grad_norm == pytest.approx(norm, nan_ok=True)
    assert equal(weights(rank), after_one)
    assert step(rank, rollouts).stepped
    after_two = weights(rank)
    undisturbed = start()
    step(undisturbed, rollouts), step(undisturbed, rollouts)
    assert equal(after_two, weights(undisturbed))


def test_a_batch_of_which_the_correction_keeps_nothing_is_not_stepped_on(start, tiny_checkpoint):
    # The entropy bonus has a gradient even so: what was rejected must not be trained on by it either.
    rank = start(correction={"mode": "mask", "low": 1.0, "high": 1.0}, entropy_coef=0.1)
    before = weights(rank)
    result = step(rank, rollouts_of(rank, batch(tiny_checkpoint)))
    assert not result.stepped and result.grad_norm > 0
    assert equal(weights(rank), before)


def test_the_reference_policy_is_the_initial_one_and_stays_it(start, tiny_checkpoint):
    rank = start(kl={"coef": 0.1})
    found = on_policy(rank, batch(tiny_checkpoint))
    sampled = np.concatenate([s.logprobs[s.action_mask] for g in found.groups for s in g.segments])
    first = logprobs(rank, found)["reference"]
    np.testing.assert_allclose(first, sampled, rtol=0, atol=1e-5)
    assert step(rank, rollouts_of(rank, found)).sums["kl_reference"] == pytest.approx(0, abs=1e-5)
    assert np.array_equal(logprobs(rank, found)["reference"], first)
    assert step(rank, rollouts_of(rank, found)).sums["kl_reference"] > 1e-4


@pytest.mark.parametrize("kl", [{"coef": 0.1, "place": "reward", "estimator": "k1"}, {"coef": 0.1}])
def test_the_policy_is_scored_before_its_step_where_its_tokens_are_paid_by_it(
    start, tiny_checkpoint, kl
):
    rank = start(advantage="reinforce_pp", kl=kl)
    found = batch(tiny_checkpoint)
    step(rank, rollouts_of(rank, found))
    scored = logprobs(rank, found)
    assert scored.keys() - {"reference"} == ({"policy"} if "place" in kl else set())
    if "place" in kl:
        np.testing.assert_allclose(scored["policy"], score_of(rank, found), rtol=0, atol=1e-5)
        assert np.abs(scored["policy"] - scored["reference"]).max() > 1e-3


def test_a_strong_penalty_holds_the_policy_at_the_reference(start, tiny_checkpoint):
    found = batch(tiny_checkpoint)

    def distance(coef: float) -> float:
        rank = start(kl={"coef": coef})
        rollouts = rollouts_of(rank, found)
        return [step(rank, rollouts).sums["kl_reference"] for _ in range(6)][-1]

    assert distance(100.0) < distance(1e-9) / 10


def test_the_coefficient_of_a_step_is_the_one_that_it_is_given(start, tiny_checkpoint):
    found = batch(tiny_checkpoint)

    def stepped(configured: float, given: float) -> dict[str, torch.Tensor]:
        rank = start(kl={"coef": configured})
        rollouts = rollouts_of(rank, found)
        for _ in range(
            2
        ):  # at the first the policy is the reference, and no penalty has a gradient
            share = shares(rollouts, 1, rank.config.trainer)[0]
            rank.step(share, rank.config.algorithm.with_kl_coef(given))
        return weights(rank)

    assert equal(stepped(1.0, 100.0), stepped(100.0, 100.0))
    assert not equal(stepped(100.0, 1.0), stepped(100.0, 100.0))


def test_on_policy_distillation_moves_the_policy_towards_its_teacher(
    start, tiny_checkpoint, tmp_path
):
    teacher = rescaled_checkpoint(tmp_path)
    rank = start(advantage="on_policy_distillation", teacher=str(teacher), loss="policy_gradient")
    found = batch(tiny_checkpoint)
    distances = []
    for _ in range(8):
        current = on_policy(rank, found)
        rollouts = rollouts_of(rank, current)
        # The reward of a token is log teacher - log policy: what is left of it is how far they are apart.
        distances.append(sum(float(abs(r.advantages).sum()) for r in rollouts))
        step(rank, rollouts)
    assert distances[-1] < 0.8 * distances[0]


def test_a_critic_beside_the_policy_learns_and_resumes_bit_for_bit(
    start, tiny_checkpoint, tmp_path
):
    """Saved, as in a run, after a forward pass of both: their gathered weights must not be taken for the sharded ones."""
    found = batch(tiny_checkpoint)
    rows = [segment for group in found.groups for segment in group.segments]
    rank = start({"lr": 0.01}, advantage="gae")
    losses = []

    def both_step(rank: TrainerRank) -> None:
        values = np.concatenate(rank.values([rows])["values"])
        rollouts = weighted_rollouts(found, rank.config.algorithm, None, values)
        share = shares(rollouts, 1, rank.config.trainer)[0]
        losses.append(rank.step_critic(share).sums["value_loss"])
        assert rank.step(share, rank.config.algorithm).stepped

    for _ in range(8):
        both_step(rank)
    assert losses[-1] < 0.5 * losses[0]
    rank.values([rows]), score_of(rank, found)
    rank.begin_save(tmp_path)
    rank.finish_save()
    both_step(rank)
    straight = (weights(rank), given_out(rank.critic))
    again = start({"lr": 0.01}, advantage="gae")
    again.load(tmp_path)
    both_step(again)
    assert equal(weights(again), straight[0])
    assert equal(given_out(again.critic), straight[1])


class Local:
    """An actor's handle without Ray: a call runs here and now."""

    def __init__(self, rank: TrainerRank) -> None:
        self.rank = rank

    def __getattr__(self, name: str) -> SimpleNamespace:
        async def answer(result):
            return result

        return SimpleNamespace(remote=lambda *given: answer(getattr(self.rank, name)(*given)))


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_a_critic_that_diverges_stops_the_policy_before_its_step(
    start, tiny_checkpoint, monkeypatch, placement
):
    monkeypatch.setattr(ray, "put", lambda share: share)
    rank = start({"lr": 0.01}, advantage="gae")
    group = TrainerGroup([Local(rank)], [(0, 1)], rank.config)
    group.critic = CriticGroup(group.ranks, group.data_places, rank.config)
    # As ``TrainerGroup.start`` has it; that one process stands for two does not matter to the order of things.
    group.processes = group.ranks if placement == "colocated" else 2 * group.ranks
    found = batch(tiny_checkpoint)
    rows = [segment for g in found.groups for segment in g.segments]

    def group_step(spoil: float):
        values = asyncio.run(group.values(rows))
        first, *rest = weighted_rollouts(found, rank.config.algorithm, None, values)
        rollouts = [first._replace(returns=first.returns + spoil), *rest]
        return asyncio.run(group.step(rollouts, rank.config.algorithm))

    before = weights(rank)
    result = group_step(math.nan)
    assert math.isnan(result.decisive["value loss"]) and math.isfinite(result.grad_norm)
    assert not result.stepped and equal(weights(rank), before)
    sound = group_step(0.0)
    assert sound.stepped and not equal(weights(rank), before)
    assert sound.critic.sums["value_loss"] > 0 and sound.critic_s > 0


@torch.no_grad()
def scale_last_norm(model: FSDP2Model, value: float) -> None:
    """Write ``value`` into the norm before the output layer, as a bad step would."""
    (norm,) = (w for name, w in model._local.items() if name.endswith("language_model.norm.weight"))
    norm.fill_(value)
    model.root.reshard()  # a forward pass may have left it gathered


def test_a_policy_and_a_critic_whose_weights_are_spoilt_give_no_numbers(
    start, tiny_checkpoint, monkeypatch
):
    monkeypatch.setattr(ray, "put", lambda share: share)
    rank = start({"lr": 0.01}, advantage="gae")
    group = TrainerGroup([Local(rank)], [(0, 1)], rank.config)
    group.critic = CriticGroup(group.ranks, group.data_places, rank.config)
    found = batch(tiny_checkpoint)
    assert asyncio.run(group.gives_numbers(found))
    for model in (rank.critic, rank.backend):
        scale_last_norm(model, math.inf)
        assert not asyncio.run(group.gives_numbers(found))
        scale_last_norm(model, 1.0)
    assert asyncio.run(group.gives_numbers(found))


def test_a_reference_that_gives_no_numbers_is_named_and_is_no_divergence(
    start, tiny_checkpoint, monkeypatch
):
    monkeypatch.setattr(ray, "put", lambda share: share)
    rank = start(kl={"coef": 0.1})
    group = TrainerGroup([Local(rank)], [(0, 1)], rank.config)
    rows = [segment for g in batch(tiny_checkpoint).groups for segment in g.segments]
    assert asyncio.run(group.logprobs(rows)).keys() == {"reference"}
    scale_last_norm(rank.policies["reference"], math.nan)
    with pytest.raises(ContractError, match="^the reference gives a sampled token") as raised:
        asyncio.run(group.logprobs(rows))
    assert not isinstance(raised.value, NotFinite)


def test_of_several_ranks_sums_add_up_and_the_slowest_and_largest_count():
    config = RunConfig.model_validate(
        {"model": {"builtin": "tiny-qwen3-vl-moe"}, "task": {"source": "shapes"}}
    )
    # The first two ranks are one place (a tensor-parallel pair) and saw the same tokens.
    group = TrainerGroup([None] * 3, [(0, 2), (0, 2), (1, 2)], config)
    twin = StepResult({"tokens": 3, "loss": 0.5}, 2.0, True, 1.0, 0.3, 10.0, 12.0, 0.01, 700)
    other = StepResult({"tokens": 4, "loss": 0.25}, 2.0, True, 1.5, 0.2, 9.0, 11.0, 0.01, 900)
    found = group._joined([twin, twin, other])
    assert (found.sums, found.grad_norm) == ({"tokens": 7, "loss": 0.75}, 2.0)
    assert (found.forward_backward_s, found.optimizer_s) == (1.5, 0.3)
    assert (found.started, found.ended) == (9.0, 12.0)
    assert (found.update_ratio, found.memory_peak_bytes) == (0.01, 900)


def test_a_batch_without_any_record_of_routing_is_refused_where_it_is_to_be_replayed():
    model = {"builtin": "tiny-qwen3-vl-moe", "routing_replay": True}
    config = RunConfig.model_validate({"model": model, "task": {"source": "shapes"}})
    with pytest.raises(ValueError, match="no trajectory carries routed_experts"):
        group = TrainerGroup([], [(0, 1)], config)
        asyncio.run(group.step([weighted(), weighted()], config.algorithm))


def test_a_policy_on_hold_is_measured_and_not_stepped(start, tiny_checkpoint):
    rank = start()
    rollouts = rollouts_of(rank, batch(tiny_checkpoint))
    before = weights(rank)
    share = shares(rollouts, 1, rank.config.trainer)[0]
    result = rank.step(share, rank.config.algorithm, hold=True)
    assert not result.stepped and result.grad_norm > 0
    assert equal(weights(rank), before)
    assert step(rank, rollouts).stepped
