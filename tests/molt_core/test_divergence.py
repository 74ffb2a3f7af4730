"""A number that is not finite ends the run, before the step where it is of the batch, and leaves the batch behind."""

import asyncio
import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from molt_core.config import RunConfig
from molt_core.divergence import Diverged
from molt_core.loop import Loop
from molt_core.metrics import RunWriter
from molt_core.train.critic import CriticResult
from molt_core.train.worker import ProbeResult, StepResult
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

    async def step(self, rollouts, algorithm, hold):
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
    with pytest.raises(
        Diverged, match="step 3: loss .*, gradient norm .*not taken.*attempts/02.*checkpoint: none"
    ):
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


def after_a_step(folder: Path, **result) -> Loop:
    """At its third step, which has a finite loss and gradient and is taken."""
    loop = loop_with(Trainer(1.0, 1.0), folder)
    tokens = sum(g.action_tokens for g in loop.pool.finished.values())
    names = ("tokens_forward", "tokens_kept", "importance_weight", "importance_weight_squared")
    sums = dict.fromkeys(names, 1.0) | {"loss": 1.0, "tokens": tokens}
    taken = {"sums": sums, "stepped": True, "update_ratio": 0.1}
    loop.trainer.result = replace(loop.trainer.result, **taken | result)
    return loop


def test_a_step_that_leaves_weights_that_are_no_numbers_ends_the_run(tmp_path):
    loop = after_a_step(tmp_path, update_ratio=math.nan)
    with pytest.raises(Diverged, match="step 3: .*update ratio nan; the weights are spoilt"):
        asyncio.run(loop._step(3))
    assert len(dumped(tmp_path)["rollouts"]) == 4


@pytest.mark.parametrize("difference", [math.nan, math.inf])
def test_weights_that_score_fresh_tokens_with_no_number_end_the_run(
    tmp_path, monkeypatch, difference
):
    # One of many: the 99th percentile is finite under an infinity.
    differences = np.array([difference, *[0.0] * 999], np.float32)

    async def done(*_):
        return ProbeResult(differences, 0)

    loop = after_a_step(tmp_path)
    monkeypatch.setattr(loop, "_refit", done)
    monkeypatch.setattr(loop, "_probe", done)
    with pytest.raises(Diverged, match="step 3: largest difference of the probe .*spoilt.*02"):
        asyncio.run(loop._step(3))
    assert [g.index for g in dumped(tmp_path)["batch"].groups] == [0, 1]


def test_the_last_good_checkpoint_is_named(tmp_path):
    loop = loop_with(Trainer(math.nan, 1.0), tmp_path)
    draft = loop.store.draft(2)
    (draft / "trainer" / "shard").write_bytes(b"weights")
    loop.store.commit(draft, b"state", {"step": 2}, tmp_path)
    with pytest.raises(Diverged, match="last good checkpoint: .*step-00000002"):
        asyncio.run(loop._step(3))
