"""A loss or gradient that is not finite ends the run before the step, and leaves the batch that did it behind."""

import asyncio
import math
import pickle

import numpy as np
import pytest

from molt_core.config import RunConfig
from molt_core.loop import Diverged, Loop
from molt_core.metrics import RunWriter
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

    def __init__(self, loss: float, norm: float) -> None:
        self.result = StepResult({"loss": loss}, norm, False, 0, 0, 0, 0)

    async def frozen_logprobs(self, rows):
        return {}

    async def step(self, rollouts):
        return self.result


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (math.inf, 1.0)])
def test_the_run_stops_and_the_batch_lies_in_the_run_s_folder(tmp_path, loss, norm):
    loop = Loop(CONFIG, tmp_path, RunWriter(tmp_path, attempt=2, steps=4))
    loop.trainer = Trainer(loss, norm)
    for index in loop.pool.dispatch():
        loop.pool.finish(group(index, prompt_id=loop.pool._prompt_id(index)))
    with pytest.raises(Diverged, match="step 3: loss .*, gradient norm .*not taken.*attempts/02"):
        asyncio.run(loop._step(3))
    dumped = pickle.loads((tmp_path / "attempts" / "02" / "diverged_batch.pkl").read_bytes())
    assert [g.index for g in dumped["batch"].groups] == [0, 1]
    assert np.array_equal(dumped["rollouts"][0].advantages, np.full(3, -(0.5**0.5), np.float32))
    assert dumped["reason"].startswith("step 3: loss")
    assert loop.optimizer_steps == 0 and loop.pool.groups.trained == 0
