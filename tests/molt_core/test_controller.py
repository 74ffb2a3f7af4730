"""A coefficient that is steered: which step it acts in, what it is steered by, and that a resumed run goes on with it."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from ray import cloudpickle

from molt_core.config import RunConfig
from molt_core.loop import Loop
from molt_core.metrics import RunWriter
from molt_core.train.results import StepResult
from tests.molt_core.make import group

KL = {"coef": 0.5, "place": "reward", "estimator": "k1", "target": 0.01}


def run_config(**kl) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"builtin": "tiny-qwen3-vl-moe"},
            "task": {"source": "shapes"},
            "rollout": {"groups_per_step": 2, "samples_per_prompt": 2},
            "loop": {"max_staleness": 0},
            "algorithm": {"advantage": "reinforce_pp", "kl": KL | kl},
        }
    )


class Trainer:
    """Every token is log 2 from the reference in k1; ``kl`` is the KL that its next step measures, a token."""

    kl, stepped = 0.0, True

    def __init__(self) -> None:
        self.coefficients, self.rewards = [], []

    async def logprobs(self, rows):
        self.tokens = sum(row.action_tokens for row in rows)
        logprobs = np.full(self.tokens, -1.0, np.float32)
        return {"policy": logprobs, "reference": logprobs - np.float32(np.log(2))}

    async def values(self, rows):
        return None

    async def step(self, rollouts, algorithm, hold):
        self.coefficients.append(algorithm.kl.coef)
        sums = dict.fromkeys(("tokens_forward", "tokens_kept", "loss"), 1.0)
        sums |= {"importance_weight": 1.0, "importance_weight_squared": 1.0}
        sums |= {"tokens": self.tokens, "kl_reference": self.kl * self.tokens}
        return StepResult(sums, 1.0, self.stepped, 0, 0, 0, 0)


def make_loop(folder: Path, **kl) -> Loop:
    loop = Loop(run_config(**kl), folder, RunWriter(folder, attempt=1, steps=9))
    loop.trainer = Trainer()
    return loop


def train(loop: Loop, step: int, kl: float, stepped: bool = True) -> dict:
    """One step that measures ``kl``; its figures."""
    loop.trainer.kl, loop.trainer.stepped = kl, stepped
    for index in loop.pool.dispatch():
        loop.pool.finish(group(index, prompt_id=loop.pool._prompt_id(index), version=step - 1))
    _, figures = asyncio.run(loop._train(step, loop.pool.take()))
    loop.pool.version += 1
    return figures


def test_a_step_s_kl_steers_the_coefficient_of_the_next(tmp_path):
    loop = make_loop(tmp_path)
    # Twice the target is an error at its bound, 0.2; then half of it, at -0.2; then a tenth above it.
    recorded = [train(loop, n, kl)["kl_coef"] for n, kl in ((1, 0.02), (2, 0.005), (3, 0.011))]
    assert recorded == pytest.approx([0.5, 0.5 * 1.02, 0.5 * 1.02 * 0.98])
    assert loop.trainer.coefficients == recorded
    assert loop.algorithm.kl.coef == pytest.approx(0.5 * 1.02 * 0.98 * 1.01)
    assert loop.config.algorithm.kl.coef == 0.5


def test_the_reward_is_paid_by_the_coefficient_of_its_step(tmp_path, monkeypatch):
    """Unwhitened, a token's advantage is its discounted return; the reward at the end is 0 or 1."""
    monkeypatch.setattr("molt_core.algo.advantages._whitened", lambda values: values)
    loop, seen = make_loop(tmp_path), []
    step = loop.trainer.step

    async def looking(rollouts, algorithm, hold):
        seen.append([rollout.advantages[-1] for rollout in rollouts])
        return await step(rollouts, algorithm, hold)

    loop.trainer.step = looking
    train(loop, 1, 0.02), train(loop, 2, 0.02)
    for coef, last in zip((0.5, 0.51), seen, strict=True):
        assert last == pytest.approx([0 - coef * np.log(2), 1 - coef * np.log(2)] * 2, rel=1e-5)


def test_a_step_that_was_not_taken_steers_nothing(tmp_path):
    """Nothing kept, or a critic that warms up: the KL of such a batch says nothing of what the penalty does."""
    loop = make_loop(tmp_path)
    train(loop, 1, 0.02, stepped=False)
    assert loop.algorithm.kl.coef == 0.5


def test_without_a_target_the_coefficient_stays_and_is_no_metric(tmp_path):
    loop = make_loop(tmp_path, target=None)
    assert "kl_coef" not in train(loop, 1, 0.02)
    assert train(loop, 2, 0.02) and loop.trainer.coefficients == [0.5, 0.5]


def test_a_resumed_run_goes_on_with_the_coefficient_that_was_saved(tmp_path):
    loop = make_loop(tmp_path)
    train(loop, 1, 0.013), train(loop, 2, 0.011)
    saved = cloudpickle.loads(cloudpickle.dumps(loop._state()))
    again = make_loop(tmp_path)
    again._restore(saved)
    assert again.algorithm.kl.coef == loop.algorithm.kl.coef != 0.5
    for one in (loop, again):
        train(one, 3, 0.009)
    assert again.trainer.coefficients == [loop.trainer.coefficients[-1]]


def test_a_fixed_coefficient_is_the_configuration_s_also_of_a_run_that_goes_on(tmp_path):
    saved = make_loop(tmp_path)._state()
    again = make_loop(tmp_path, target=None, coef=0.25)
    again._restore(saved)
    assert again.algorithm.kl.coef == 0.25
