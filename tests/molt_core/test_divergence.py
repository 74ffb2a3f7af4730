"""A number that is not finite ends the run, before the step where it is of the batch; batch and good state are kept."""

import asyncio
import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ray.exceptions import RayTaskError

from molt_core.config import RunConfig
from molt_core.divergence import Diverged
from molt_core.loop import Loop
from molt_core.metrics import RunWriter
from molt_core.train.checkpoint import Saver
from molt_core.train.critic import CriticResult
from molt_core.train.results import ProbeResult, StepResult
from molt_core.types import ContractError, NotFinite
from tests.molt_core.make import group
from tests.molt_core.test_checkpoint import write

CONFIG = RunConfig.model_validate(
    {
        "model": {"builtin": "tiny-qwen3-vl-moe"},
        "task": {"source": "shapes"},
        "rollout": {"groups_per_step": 2, "samples_per_prompt": 2},
        "loop": {"max_staleness": 0},
    }
)


class Trainer:
    """Answers every batch with the given loss and gradient norm; its weights give numbers unless told otherwise."""

    frozen: dict = {}
    critic_values, sound, save_fails = None, True, False

    def __init__(self, loss: float, norm: float, critic: CriticResult | None = None) -> None:
        self.result = StepResult({"loss": loss}, norm, False, 0, 0, 0, 0, critic=critic)

    async def logprobs(self, rows):
        return self.frozen

    async def values(self, rows):
        return self.critic_values

    async def step(self, rollouts, algorithm, hold):
        return self.result

    async def gives_numbers(self, batch):
        return self.sound

    async def begin_save(self, folder):
        if self.save_fails:
            raise OSError("No space left on device")
        (folder / "shard").write_bytes(b"weights")

    async def finish_save(self): ...


def loop_with(trainer: Trainer, folder: Path, step: int = 3) -> Loop:
    """At ``step``: every group of the batch is there."""
    loop = Loop(CONFIG, folder, RunWriter(folder, attempt=2, steps=4))
    loop.trainer, loop.saver = trainer, Saver(loop.store, trainer, folder / "given")
    loop.pool.version, loop.optimizer_steps = step - 1, step - 1
    loop.pool.dispatched = 2 * (step - 1)
    loop.record = {"step": step - 1, "reward_mean": 0.25}
    for index in loop.pool.dispatch():
        loop.pool.finish(group(index, prompt_id=loop.pool._prompt_id(index), version=step - 1))
    return loop


def play(loop: Loop, step: int = 3) -> None:
    """The step, and how a run ends where it fails."""

    async def run():
        try:
            await loop._step(step)
        except NotFinite as error:
            raise await loop._ended_by(error) from error

    asyncio.run(run())


def dumped(folder: Path) -> dict:
    return pickle.loads((folder / "attempts" / "02" / "diverged_batch.pkl").read_bytes())


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (-math.inf, 1.0)])
def test_the_run_stops_and_the_batch_lies_in_the_run_s_folder(tmp_path, loss, norm):
    loop = loop_with(Trainer(loss, norm), tmp_path)
    with pytest.raises(Diverged, match=f"step 3: loss {loss}, gradient norm {norm}; .*not taken"):
        play(loop)
    found = dumped(tmp_path)
    assert [g.index for g in found["batch"].groups] == [4, 5]
    assert np.array_equal(found["rollouts"][0].advantages, np.full(4, -(0.5**0.5), np.float32))
    assert found["reason"].startswith("step 3: loss")
    assert loop.optimizer_steps == 2 and loop.pool.groups.trained == 0


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf)])
def test_a_critic_that_diverges_ends_the_run_as_well(tmp_path, loss, norm):
    trainer = Trainer(1.0, 1.0, CriticResult({"value_loss": loss}, norm, 0))
    with pytest.raises(Diverged, match="value loss .*, critic's gradient norm .*not taken"):
        play(loop_with(trainer, tmp_path))
    assert len(dumped(tmp_path)["rollouts"]) == 4


def test_values_that_are_no_numbers_end_the_run_before_they_become_advantages(tmp_path):
    trainer = Trainer(1.0, 1.0)
    trainer.critic_values, trainer.sound = np.array([0.0, math.nan], np.float32), False
    with pytest.raises(Diverged, match="step 3: largest number of the critic nan"):
        play(loop_with(trainer, tmp_path))
    assert np.isnan(dumped(tmp_path)["critic"][1])


def test_a_policy_whose_own_log_probabilities_are_its_reward_is_looked_at_before_they_are(tmp_path):
    trainer = Trainer(1.0, 1.0)
    trainer.frozen, trainer.sound = {"policy": np.array([-1.0, -math.inf], np.float32)}, False
    with pytest.raises(
        Diverged, match="step 3: largest number of the policy inf; .*step 2 give no"
    ):
        play(loop_with(trainer, tmp_path))


# What is good where the step was not taken


def steps(loop: Loop) -> list[int]:
    return [checkpoint.step for checkpoint in loop.store.scan()[0]]


def test_the_state_before_a_step_that_was_not_taken_becomes_a_checkpoint(tmp_path):
    loop = loop_with(Trainer(math.nan, 1.0), tmp_path)
    loop.reward_sums.add(group(7, rewards=(0.0, 0.5)))  # arrived since, and in no record yet
    with pytest.raises(Diverged, match="last good checkpoint: .*checkpoints/step-00000002$"):
        play(loop)
    (saved,), torn = loop.store.scan()
    assert (saved.step, saved.record["reward_mean"], torn) == (2, 0.25, [])
    assert (saved.path / saved.policy).resolve() == tmp_path / "given"
    again = Loop(CONFIG, tmp_path, RunWriter(tmp_path, attempt=3, steps=4))
    again._restore(saved.loop_state())
    # The batch is not trained: whoever goes on from there meets it.
    assert [g.index for g in again.pool.take().groups] == [4, 5]
    assert (again.pool.version, again.optimizer_steps) == (2, 2)
    assert again.reward_sums.rewards == [0.0, 0.5]
    again.pool.check()


def test_a_checkpoint_of_that_state_is_not_written_twice(tmp_path):
    loop = loop_with(Trainer(math.nan, 1.0), tmp_path)
    regular = write(loop.store, 2)
    with pytest.raises(Diverged, match="last good checkpoint: .*step-00000002"):
        play(loop)
    assert loop.store.scan()[0] == [regular]


def test_weights_that_give_no_numbers_before_the_step_are_not_called_good(tmp_path):
    """A probe that is due every second step can have missed what the step before did."""
    trainer = Trainer(math.nan, 1.0)
    trainer.sound = False
    loop = loop_with(trainer, tmp_path)
    write(loop.store, 1), write(loop.store, 2)
    message = "the weights of step 2 give no numbers on it either; last good .*step-00000001"
    with pytest.raises(Diverged, match=message):
        play(loop)


def test_before_the_second_step_the_good_policy_is_the_given_one(tmp_path):
    loop = loop_with(Trainer(math.nan, 1.0), tmp_path, step=1)
    with pytest.raises(Diverged, match="checkpoint: none but the policy .* from, .*/given"):
        play(loop, step=1)
    assert steps(loop) == []


def test_a_critic_that_its_first_batch_has_spoilt_is_no_fault_of_the_given_weights(tmp_path):
    """It takes several steps a batch, so that the second can find what the first has left."""
    trainer = Trainer(1.0, 1.0, CriticResult({"value_loss": math.nan}, 1.0, 0))
    trainer.sound = False
    with pytest.raises(Diverged, match="value loss nan.*none but the policy"):
        play(loop_with(trainer, tmp_path, step=1), step=1)


def test_a_full_disk_does_not_hide_that_the_run_diverged(tmp_path):
    trainer = Trainer(math.nan, 1.0)
    trainer.save_fails = True
    with pytest.raises(Diverged, match="loss nan.*none but .*could not be done: .*No space left"):
        play(loop_with(trainer, tmp_path))


# What a step has left behind


def after_a_step(folder: Path, step: int = 3, **result) -> Loop:
    """At its third step, which has a finite loss and gradient and is taken."""
    loop = loop_with(Trainer(1.0, 1.0), folder, step)
    tokens = sum(g.action_tokens for g in loop.pool.finished.values())
    names = ("tokens_forward", "tokens_kept", "importance_weight", "importance_weight_squared")
    sums = dict.fromkeys(names, 1.0) | {"loss": 1.0, "tokens": tokens}
    taken = {"sums": sums, "stepped": True, "update_ratio": 0.1}
    loop.trainer.result = replace(loop.trainer.result, **taken | result)
    return loop


def test_a_step_that_leaves_weights_that_are_no_numbers_ends_the_run(tmp_path):
    loop = after_a_step(tmp_path, update_ratio=math.nan)
    write(loop.store, 2)
    message = "update ratio nan; the weights are spoilt by step 3, .*02.*good .*step-00000002"
    with pytest.raises(Diverged, match=message):
        play(loop)
    assert len(dumped(tmp_path)["rollouts"]) == 4 and steps(loop) == [2]


class Workers:
    """Engines that sample what they are told to; ``failure`` is raised instead."""

    workers, failure = (), None

    async def everywhere(self, *_): ...

    def rollouts(self, *_):
        return []

    async def fresh_tokens(self, version, part):
        if self.failure is not None:
            raise RayTaskError("probe", "a stack", self.failure).as_instanceof_cause()
        return []


def with_engines(loop: Loop, failure=None, differences=()) -> Loop:
    async def sent(workers): ...

    async def score(rows):
        return ProbeResult(np.array(differences, np.float32), 0)

    loop.trainer.send_weights, loop.trainer.score = sent, score
    loop.workers = Workers()
    loop.workers.failure = failure
    return loop


@pytest.mark.parametrize("difference", [math.nan, math.inf])
def test_weights_that_score_fresh_tokens_with_no_number_end_the_run(tmp_path, difference):
    # One of many: the 99th percentile is finite under an infinity.
    loop = with_engines(after_a_step(tmp_path), differences=[difference, *[0.0] * 999])
    message = (
        f"step 3: largest difference of the probe {difference}; the weights are spoilt by step 3"
    )
    with pytest.raises(Diverged, match=message):
        play(loop)
    assert [g.index for g in dumped(tmp_path)["batch"].groups] == [4, 5]


def test_a_token_that_the_engine_gives_no_number_after_a_step_is_a_divergence(tmp_path):
    loop = with_engines(after_a_step(tmp_path), NotFinite("the engine sampled nan", 3))
    write(loop.store, 2), write(loop.store, 3)  # the newest one has the weights that do it
    message = "^the engine sampled nan; .* spoilt by step 3, .*batch of step 3.*step-00000002$"
    with pytest.raises(Diverged, match=message):
        play(loop)
    assert [g.index for g in dumped(tmp_path)["batch"].groups] == [4, 5]


def test_a_token_of_the_given_weights_that_is_no_number_is_no_divergence_and_names_the_model(
    tmp_path,
):
    loop = with_engines(loop_with(Trainer(1.0, 1.0), tmp_path, step=1))
    loop.failure = NotFinite("the engine sampled nan", 0)
    loop.pool.finished.clear()
    with pytest.raises(
        ContractError, match="sampled nan, under the weights .*given.* see .*/given"
    ):
        play(loop, step=1)


def test_the_given_weights_are_looked_at_before_anything_is_trained(tmp_path):
    trainer = Trainer(1.0, 1.0)
    loop = Loop(CONFIG, tmp_path, RunWriter(tmp_path, attempt=2, steps=4))
    loop.trainer, loop.saver = trainer, Saver(loop.store, trainer, tmp_path / "given")
    with_engines(loop, differences=[math.nan])
    with pytest.raises(NotFinite, match="step 0: largest difference of the probe nan") as raised:
        asyncio.run(loop._begin())
    end = asyncio.run(loop._ended_by(raised.value))
    assert type(end) is ContractError and not (tmp_path / "metrics.jsonl").exists()


def test_restored_weights_are_looked_at_before_the_run_goes_on(tmp_path):
    loop = with_engines(loop_with(Trainer(1.0, 1.0), tmp_path), differences=[math.inf])
    write(loop.store, 1)
    saved = replace(write(loop.store, 2), record=loop.record)
    (saved.path / "loop.pickle").write_bytes(pickle.dumps(loop._state()))

    async def nothing(folder): ...

    loop.trainer.load = nothing
    again = with_engines(loop_with(loop.trainer, tmp_path), differences=[math.inf])
    with pytest.raises(NotFinite) as raised:
        asyncio.run(again._resume(saved))
    message = str(asyncio.run(again._ended_by(raised.value)))
    assert (
        "step 2: largest difference of the probe inf; the weights are spoilt by step 2;" in message
    )
    assert message.endswith("step-00000001")
    assert not list(tmp_path.glob("attempts/*/resume.json"))
