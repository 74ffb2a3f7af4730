"""A loss or gradient that is not finite ends the run before the step, and leaves the batch that did it behind."""

import asyncio
import math
import pickle
from pathlib import Path

import numpy as np
import pytest

from molt_core.config import RunConfig
from molt_core.loop import Diverged, Loop
from molt_core.metrics import RunWriter
from molt_core.train.critic import CriticResult
from molt_core.train.worker import StepResult
from tests.molt_core.make import group

CONFIG = RunConfig.model_validate(
    {
        "model": {"builtin": "tiny-qwen3-vl-moe"},
        "task": {"source": "shapes"},
        "rollout": {"groups_per_step": 2, "samples_per_prompt": 2},
        "loop": {"max_staleness": 0},
    }
)


class Trainer:
    """Answers every batch with the given loss and gradient norm."""

    critic_values = None

    def __init__(self, loss: float, norm: float, critic: CriticResult | None = None) -> None:
        self.result = StepResult({"loss": loss}, norm, False, 0, 0, 0, 0, critic=critic)

    async def frozen_logprobs(self, rows):
        return {}

    async def values(self, rows):
        return self.critic_values

    async def step(self, rollouts, hold):
        return self.result


def loop_with(trainer: Trainer, folder: Path, config: RunConfig = CONFIG) -> Loop:
    """At its third step: every group of the batch is there."""
    loop = Loop(config, folder, RunWriter(folder, attempt=2, steps=4))
    loop.trainer = trainer
    for index in loop.pool.dispatch():
        loop.pool.finish(group(index, prompt_id=loop.pool._prompt_id(index)))
    return loop


def dumped(folder: Path) -> dict:
    return pickle.loads((folder / "attempts" / "02" / "diverged_batch.pkl").read_bytes())


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (math.inf, 1.0)])
def test_the_run_stops_and_the_batch_lies_in_the_run_s_folder(tmp_path, loss, norm):
    loop = loop_with(Trainer(loss, norm), tmp_path)
    with pytest.raises(Diverged, match="step 3: loss .*, gradient norm .*not taken.*attempts/02"):
        asyncio.run(loop._step(3))
    found = dumped(tmp_path)
    assert [g.index for g in found["batch"].groups] == [0, 1]
    assert np.array_equal(found["rollouts"][0].advantages, np.full(3, -(0.5**0.5), np.float32))
    assert found["reason"].startswith("step 3: loss")
    assert loop.optimizer_steps == 0 and loop.pool.groups.trained == 0


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf)])
def test_a_critic_that_diverges_ends_the_run_as_well(tmp_path, loss, norm):
    trainer = Trainer(1.0, 1.0, CriticResult({"value_loss": loss}, norm, 0))
    loop = loop_with(trainer, tmp_path)
    with pytest.raises(Diverged, match="value loss .*, critic's gradient norm .*not taken"):
        asyncio.run(loop._step(3))
    assert len(dumped(tmp_path)["rollouts"]) == 4


def test_values_that_are_no_numbers_end_the_run_before_they_become_advantages(tmp_path):
    loop = loop_with(Trainer(1.0, 1.0), tmp_path)
    loop.trainer.critic_values = np.array([0.0, math.nan], np.float32)
    with pytest.raises(Diverged, match="step 3: largest value of the critic nan"):
        asyncio.run(loop._step(3))
    assert np.isnan(dumped(tmp_path)["values"][1])
