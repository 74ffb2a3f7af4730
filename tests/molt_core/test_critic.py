"""The critic against transformers and torch's AdamW: one rank, two ranks with uneven shares, and after a restart."""

import multiprocessing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from molt_core.algo.aggregation import WeightedRollout
from molt_core.config import RunConfig
from molt_core.models.load import load_policy
from molt_core.train.critic import CriticRank, CriticResult, weighted_value_loss
from molt_core.train.split import shares
from molt_core.train.state import SavedState
from tests.harness.trainer_cases import (
    OPTIMIZER,
    STEPS,
    free_port,
    given_out,
    largest_difference,
    oracle_logits,
    rescaled_checkpoint,
    trajectories,
)

IMAGES = (1, 2, 0, 1, 0, 0)
"""Images in each row: with two ranks, one of them also gets a micro-batch without any."""
CLIP = 0.3


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return rescaled_checkpoint(tmp_path_factory.mktemp("policy"))


def build(checkpoint: Path, rank: int = 0, steps: int = STEPS, **trainer) -> CriticRank:
    """A rank in the process group that there is, whose call takes ``steps`` steps."""
    config = RunConfig.model_validate(
        {
            "model": {"builtin": "tiny-qwen3-vl-moe"},
            "task": {"source": "shapes"},
            "algorithm": {"advantage": "gae"},
            "optimizer": OPTIMIZER.model_dump() | {"lr": 0.5},
            "critic": {
                "lr": OPTIMIZER.lr,
                "steps_per_batch": steps,
                "clip": CLIP if steps > 1 else None,
            },
            "trainer": trainer,
        }
    )
    built = CriticRank(rank, config, checkpoint)
    built.load_models()
    return built


def rollouts(checkpoint: Path) -> list[WeightedRollout]:
    """A rollout a row: returns up to 2, values before the steps up to 1, no two tokens weighed alike."""
    rng = np.random.default_rng(8)
    found = []
    for row in trajectories(checkpoint, IMAGES):
        n = row.action_tokens
        returns, values = 2 * rng.random(n, np.float32), rng.random(n, np.float32) - 0.5
        weights = rng.random(n, np.float32) / 20
        found.append(WeightedRollout((row,), returns - values, weights, None, values, returns))
    return found


def step(rank: CriticRank, checkpoint: Path) -> CriticResult:
    cut = shares(rollouts(checkpoint), rank.critic.data_size, rank.config.trainer)
    return rank.step_critic(cut[rank.critic.data_rank])


def weights(rank: CriticRank) -> dict[str, torch.Tensor]:
    return given_out(rank.critic)


@pytest.fixture(scope="module")
def oracle(checkpoint):
    """Transformers with a linear layer of one output in place of its last, and AdamW: (losses, clipped, norms, weights)."""
    policy, data = load_policy(checkpoint), rollouts(checkpoint)
    policy.lm_head = nn.Linear(policy.lm_head.in_features, 1, bias=False)
    nn.init.zeros_(policy.lm_head.weight)
    names = dict(policy.named_parameters())
    decayed = [p for name, p in names.items() if p.dim() >= 2 and name != "lm_head.weight"]
    rest = [p for name, p in names.items() if p.dim() == 1 or name == "lm_head.weight"]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 1.0}, {"params": rest, "weight_decay": 0.0}],
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
    )
    old, target, weight = (
        torch.from_numpy(np.concatenate([getattr(r, name) for r in data]))
        for name in ("values", "returns", "weights")
    )
    losses, clipped, norms = [], [], []
    for _ in range(STEPS):
        values = oracle_logits(policy, [r.segments[0] for r in data]).squeeze(1)
        near = torch.minimum(torch.maximum(values, old - CLIP), old + CLIP)
        loss = (torch.maximum((values - target) ** 2, (near - target) ** 2) / 2 * weight).sum()
        loss.backward()
        losses.append(float(loss.detach()))
        clipped.append(float((near != values).sum()))
        norms.append(float(nn.utils.clip_grad_norm_(names.values(), OPTIMIZER.clip_norm)))
        optimizer.step()
        optimizer.zero_grad()
    found = {name: p.detach() for name, p in names.items() if name != "lm_head.weight"}
    return losses, clipped, norms, found | {"value_head": policy.lm_head.weight.detach()[0]}


def assert_equals_oracle(results: list[CriticResult], found, oracle) -> None:
    losses, clipped, norms, expected = oracle
    assert sum(r.sums["value_loss"] for r in results) == pytest.approx(np.mean(losses), rel=1e-5)
    assert sum(r.sums["value_clip_fraction"] for r in results) == pytest.approx(np.mean(clipped))
    for result in results:
        assert result.grad_norm == pytest.approx(np.mean(norms), rel=1e-5)
    assert largest_difference(found, expected) < 5e-6


@pytest.mark.parametrize(
    "cut",
    [{}, {"micro_batch_rows": 1}, {"max_tokens_per_micro_batch": 48}],
    ids=["all rows", "row by row", "48 tokens"],
)
def test_one_rank_takes_the_plain_trainers_steps(checkpoint, oracle, cut):
    rank = build(checkpoint, **cut)
    result = step(rank, checkpoint)
    assert 0 < oracle[1][0] < result.sums["tokens"], "nothing or everything was clipped"
    assert_equals_oracle([result], weights(rank), oracle)


def look(rank: CriticRank, checkpoint: Path) -> None:
    """Ask for values as every step does, which leaves gathered weights in the module."""
    rank.values([trajectories(checkpoint, IMAGES)[:2]])


def _rank(rank: int, port: int, checkpoint: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    cut = {"world_size": 2, "micro_batch_rows": 2}
    whole = build(checkpoint, rank, **cut)
    result = step(whole, checkpoint)
    single = build(checkpoint, rank, steps=1, **cut)
    step(single, checkpoint)
    look(single, checkpoint)
    single.begin_save(out / "two")
    step(single, checkpoint)  # must not reach what is being saved
    single.finish_save()
    resumed, again = build(checkpoint, rank, steps=1, **cut), []
    for folder in ("two", "one"):
        look(resumed, checkpoint)
        resumed.load(out / folder)
        look(resumed, checkpoint)
        step(resumed, checkpoint)
        again.append(weights(resumed))
    torch.save((result, weights(whole), weights(single), *again), out / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(checkpoint, tmp_path_factory):
    out, port = tmp_path_factory.mktemp("ranks"), free_port()
    alone = build(checkpoint, steps=1)
    step(alone, checkpoint)
    alone.begin_save(out / "one")
    alone.finish_save()
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(r, port, checkpoint, out)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    return out, [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.distributed
def test_two_ranks_with_uneven_shares_take_the_same_steps(oracle, two_ranks):
    results = [result for result, *_ in two_ranks[1]]
    assert results[0].sums["tokens"] != results[1].sums["tokens"]
    for _, found, *_ in two_ranks[1]:
        assert_equals_oracle(results, found, oracle)


@pytest.mark.distributed
def test_a_restart_goes_on_exactly_and_from_another_world_size(checkpoint, two_ranks):
    out, results = two_ranks
    for _, _, straight, from_two, from_one in results:
        assert largest_difference(from_two, straight) == 0
        assert largest_difference(from_one, straight) < 5e-6
    alone = build(checkpoint, steps=1)
    alone.load(out / "two")
    step(alone, checkpoint)
    assert largest_difference(weights(alone), results[0][2]) < 5e-6


@pytest.mark.distributed
def test_the_moments_of_its_head_are_saved(two_ranks):
    saved = SavedState(two_ranks[0] / "two" / "critic")
    assert saved.steps == 1
    assert float(saved.tensor("first_moments", "value_head").abs().max()) > 0


def test_a_value_is_of_the_state_before_its_token(checkpoint):
    rank = build(checkpoint)
    step(rank, checkpoint)
    rows = trajectories(checkpoint, IMAGES)[:2]
    last, sampled = rows[1].token_ids.copy(), np.flatnonzero(rows[1].action_mask)
    last[sampled[-1]] = (last[sampled[-1]] + 1) % 256
    first = rows[1].token_ids.copy()
    first[sampled[0]] = (first[sampled[0]] + 1) % 256
    changed = [replace(rows[1], token_ids=ids) for ids in (last, first)]
    one, *others = (rank.values([[rows[0], row]])["values"] for row in (rows[1], *changed))
    assert [len(values) for values in one] == [row.action_tokens for row in rows]
    np.testing.assert_allclose(others[0][1], one[1], atol=1e-6)
    assert abs(others[1][1][0] - one[1][0]) < 1e-6 < abs(others[1][1][1:] - one[1][1:]).min()


def test_values_are_0_at_first_and_a_target_that_is_no_number_changes_nothing(checkpoint):
    rank, data = build(checkpoint, steps=2), rollouts(checkpoint)
    row = data[0].segments[0]
    assert not np.any(rank.values([[row]])["values"][0])
    before = weights(rank)
    spoilt = data[0]._replace(returns=np.full_like(data[0].returns, np.nan))
    result = rank.step_critic([[spoilt, *data[1:]]])
    assert np.isnan([result.sums["value_loss"], result.grad_norm]).all()
    assert largest_difference(weights(rank), before) == 0
    assert not np.any(rank.values([[row]])["values"][0])


def test_the_objective_is_the_weighted_sum_of_token_losses(checkpoint):
    # V_old 0, clip 0.2, G 2 | 0 | 1, V 1 | 1 | 0.1: losses 1.62, 0.5, 0.405 (test_losses.py), weighed 0.1, 0.2, 0.4.
    row = trajectories(checkpoint, (0,))[0]
    given = [[2.0, 0.0, 1.0], [0.1, 0.2, 0.4]]
    returns, weights = (np.array(numbers, np.float32) for numbers in given)
    one = WeightedRollout((row,), returns, weights, None, np.zeros(3, np.float32), returns)
    values = torch.tensor([1.0, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    loss, beyond = weighted_value_loss([one], values, 0.2)
    assert float(loss) == pytest.approx(0.162 + 0.1 + 0.162)
    assert beyond.tolist() == [True, True, False]
    # Squared errors over 2, without a clip: 0.5, 0.5, 0.405.
    assert float(weighted_value_loss([one], values, None)[0]) == pytest.approx(0.05 + 0.1 + 0.162)
    torch.autograd.gradcheck(lambda v: weighted_value_loss([one], v, 0.2)[0], (values,))
