"""The one asynchronous loop: agents generate, the trainer steps, the engines are refitted, all at once.

    dispatch -> [engines: agents generate] -> pool -> batch -> [trainer: one step] -> refit -> probe -> dispatch

The engines go on generating while the trainer steps; a refit freezes requests where they are, and they go on under
the new weights. Synchronous training is this loop with ``max_staleness: 0``. The loop keeps the books (``rollout/pool.py``)
and stops where they do not close.

Lockstep is this loop with a fixed order: batch k is generated wholly at version k-1-``max_staleness`` and in one composition
(``rollout/waves.py``), and a step ends before anything new is dispatched, so that no record depends on what arrives when.

A run goes on from the newest complete checkpoint in its folder (``train/checkpoint.py``). Under lockstep it then equals a run
that was never interrupted, bit for bit in every field but times, attempts and memory. Otherwise no prompt is lost or trained
twice: finished groups are saved, those still being generated are generated again. ``request_stop`` saves after the step in
progress and ends the run; it goes on from there.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from molt_core import metrics
from molt_core.algo.aggregation import weighted_rollouts
from molt_core.algo.kl import next_coefficient
from molt_core.config import RunConfig
from molt_core.data import prompt_source
from molt_core.divergence import check_finite, ended_by
from molt_core.placement import Reserved, reserve
from molt_core.rollout.pool import BooksError, Pool
from molt_core.rollout.refit import RefitReport
from molt_core.rollout.worker import WorkerGroup
from molt_core.train.checkpoint import Checkpoint, CheckpointStore, Saver
from molt_core.train.results import ProbeResult, StepResult
from molt_core.train.worker import TrainerGroup
from molt_core.types import Batch, Group, NotFinite

FUTILE_BATCHES = 8
"""Batches' worth of groups dropped in a row, without one kept, after which a run gives up."""

DOUBTFUL_PROBE_PARTS = 4
"""Further samples of a probe whose first one is in doubt."""


class EverythingDropped(RuntimeError):
    """No group survives the filters; training on nothing would look like a run."""


class Loop:
    """One run. ``await Loop(...).run()`` trains ``config.loop.steps`` steps and leaves its record in ``writer``."""

    def __init__(self, config: RunConfig, checkpoint: Path, writer: metrics.RunWriter) -> None:
        """checkpoint: the Hugging Face folder of the initial policy."""
        self.config, self.checkpoint, self.writer = config, checkpoint, writer
        prompts = prompt_source(config.task, "train", config.seed)
        self.pool = Pool(config.rollout, config.loop, prompts.prompt_id)
        self.store = CheckpointStore(writer.checkpoints, config.checkpoint)
        self.changed = asyncio.Event()
        self.tasks: set[asyncio.Task] = set()
        self.dropped_in_a_row = 0
        self.agent_error = ""  # what the agent said that failed last
        self.failure: BaseException | None = None
        self.reward_sums = metrics.RewardSums()
        self.optimizer_steps = 0
        self.algorithm = config.algorithm
        """What the next step trains by: ``kl.coef`` is steered where it has a target."""
        self.trained_on: dict[str, Any] = {}
        """The last batch that was trained on, for whoever asks what spoilt the weights."""
        self.record: Mapping[str, Any] = {}
        """Of the last step."""
        self.tokens_before: Counter[str] = Counter()
        """Tokens that engines of earlier attempts sampled, by what they were for; ``engine_tokens``: with this attempt's."""
        self.engine_tokens: Counter[str] = Counter()
        self.stop_requested = False

    def request_stop(self) -> None:
        """Save after the step in progress, then end ``run``. Safe to call from a signal handler of the event loop."""
        self.stop_requested = True

    async def run(self) -> bool:
        """Train to the last step. False where the run stopped before it, as requested, with its state saved."""
        self.writer.heartbeat("starting", 0)
        async with reserve(self.config) as places:
            self.writer.placement(places.names())
            finished = await self._run(places)
        if finished:
            self.writer.heartbeat("finished", self.config.loop.steps)
        return finished

    async def _run(self, places: Reserved) -> bool:
        shutil.rmtree(self.writer.policy_folder, ignore_errors=True)
        saved = self.store.newest()
        await self._start(places)
        try:
            first = 1 + (await self._begin() if saved is None else await self._resume(saved))
            self.step_started = time.time()
            for step in range(first, self.config.loop.steps + 1):
                self.writer.heartbeat("training", step - 1)
                if not await self._step(step):
                    await self.saver.wait()
                    self.writer.heartbeat("stopped", step)
                    return False
            await self.saver.wait()
            await self._close_books()
            await self.trainer.export(self.writer.policy_folder)
        except NotFinite as error:
            raise await self._ended_by(error) from error
        finally:
            for task in self.tasks:
                task.cancel()
            # The save in progress is completed, also of a run that diverged; a dead engine must not hide why it died.
            ends = self.saver.wait(), *self.workers.call("shutdown")
            await asyncio.gather(*ends, return_exceptions=True)
        return True

    async def _start(self, places: Reserved) -> None:
        """Bring up engines and trainer side by side, each on its place, and connect them."""
        self.workers = WorkerGroup.create(self.config, self.checkpoint, places.engines)
        self.trainer, _ = await asyncio.gather(
            TrainerGroup.start(self.config, self.checkpoint, places.ranks),
            self.workers.everywhere("start"),
        )
        await self.trainer.connect(self.workers.workers, self.config.engine.tensor_parallel)
        self.saver = Saver(self.store, self.trainer, self.checkpoint)

    async def _begin(self) -> int:
        """Version 0, measured before anything is trained; returns the step that is done, 0."""
        await self._refit(0)  # an identity, which the probe shows
        probe = await self._probe()
        evaluation = await self._evaluate()
        self.record = self.writer.record(
            {"step": 0, "phase": "initial", **metrics.probe(probe), **evaluation}
        )
        self._dispatch()
        return 0

    async def _resume(self, saved: Checkpoint) -> int:
        """Take over what ``saved`` holds and probe it; returns the step that is done."""
        await self.trainer.load(saved.trainer)
        self._restore(saved.loop_state())
        self.record = saved.record
        await self._refit(self.pool.version)
        probe = await self._probe(due=True)
        # This probe was counted when the step was recorded.
        self.tokens_before["probe"] -= len(probe.differences) + probe.tied
        self.writer.resumed(
            saved.step, {"policy_version": self.pool.version, **metrics.probe(probe)}
        )
        self._dispatch()
        return saved.step

    # Generation

    def _dispatch(self) -> None:
        for group in self.workers.rollouts(self.pool.dispatch(), self.pool.version):
            task = asyncio.ensure_future(group)
            self.tasks.add(task)
            task.add_done_callback(self._generated)

    def _generated(self, task: asyncio.Task) -> None:
        """A group has arrived: book it, replace it where it was dropped, wake the trainer.

        Whatever goes wrong is for ``_until`` to raise: what a callback raises, asyncio only logs.
        """
        self.tasks.discard(task)
        if task.cancelled():
            return
        try:
            self._book(task.result())
            self._dispatch()
        except Exception as error:
            self.failure = self.failure or error
        self.changed.set()

    def _book(self, group: Group) -> None:
        self.reward_sums.add(group)
        dropped = self.pool.finish(group)
        self.dropped_in_a_row = self.dropped_in_a_row + 1 if dropped else 0
        if group.error and not self.agent_error:
            print(f"a rollout is lost, more are counted in silence: {group.error}", flush=True)
        self.agent_error = group.error or self.agent_error

    async def _until(self, condition) -> Any:
        """Wait for groups to arrive until ``condition()`` is true; raises what went wrong with one."""
        while True:
            if self.failure is not None:
                raise self.failure
            if self.dropped_in_a_row >= FUTILE_BATCHES * self.pool.size:
                raise EverythingDropped(
                    f"the last {self.dropped_in_a_row} groups were all dropped: {dict(self.pool.groups.dropped)}; "
                    f"the agent's last error: {self.agent_error or 'none'}"
                )
            value = condition()
            if value:
                return value
            self.changed.clear()
            await self.changed.wait()

    # Training

    async def _step(self, step: int) -> bool:
        """Train one batch, refit, measure, record, save; False where the run is to stop now."""
        waiting = time.time()
        batch: Batch = await self._until(self.pool.take)
        lags = self.pool.lags(batch)
        waited = time.time() - waiting
        result, figures = await self._train(step, batch)
        if self.pool.lockstep:
            waiting = time.time()
            await self._until(lambda: not self.pool.running)
            waited += time.time() - waiting
        refit_started = time.time()
        refit = await self._refit(self.pool.version + 1)
        refit_s = time.time() - refit_started
        probe_started = time.time()
        probe = await self._probe()
        probe_s = time.time() - probe_started
        if self._evaluates(step):
            self.writer.heartbeat("evaluating", step)
        evaluation = await self._evaluate() if self._evaluates(step) else {}
        busy = await self._engine_clocks()
        stops = self.stop_requested and step < self.config.loop.steps
        saves = stops or self.config.saves_after(step)
        save_started = time.time()
        if saves:
            await self.saver.wait()
        # One moment: the books of this record are those of the state that is saved.
        self.pool.check()
        dispatch_hash, trained_hash = self.pool.fingerprints(step)
        counts = {**metrics.books(self.pool), **self.reward_sums.take()}
        checkpoint = {}
        if saves:
            await self.saver.begin(step, self._state())
            checkpoint["t_checkpoint_s"] = time.time() - save_started
        ended = time.time()
        self.record = self.writer.record(
            {
                "step": step,
                "phase": "train",
                "optimizer_steps": self.optimizer_steps,
                "wall_s": ended - self.step_started,
                "t_wait_s": waited,
                "t_forward_backward_s": result.forward_backward_s,
                "t_optimizer_s": result.optimizer_s,
                "t_refit_s": refit_s,
                "t_probe_s": probe_s,
                "t_overlap_s": metrics.overlap_s(busy, result.started, result.ended),
                "refit_bytes": refit.bytes,
                "devices": self.config.devices,
                "policy_version": self.pool.version,
                **metrics.lag(lags),
                "prompts_fingerprint": dispatch_hash,
                "trained_fingerprint": trained_hash,
                **counts,
                "tokens_evaluation": self.engine_tokens["eval"],
                "tokens_probe": self.engine_tokens["probe"],
                **metrics.batch(batch),
                **figures,
                **(metrics.probe(probe) if probe else {}),
                **evaluation,
                **checkpoint,
            }
        )
        self.step_started = ended
        if saves:
            self.saver.commit(self.record)
        self.saver.check()
        if not stops:
            self._dispatch()
        return not stops

    async def _train(self, step: int, batch: Batch) -> tuple[StepResult, dict[str, Any]]:
        """One optimiser step, and its figures for the record. Raises NotFinite (``divergence.py``).

        A critic steps first: where the policy's numbers are the bad ones, it has stepped on that batch.
        """
        rows = [segment for group in batch.groups for segment in group.segments]
        logprobs = await self.trainer.logprobs(rows)
        values = await self.trainer.values(rows)
        scored = logprobs if values is None else {**logprobs, "critic": values}
        largest = {f"largest number of the {name}": np.abs(x).max() for name, x in scored.items()}
        check_finite(step, largest, batch=batch, **scored)
        rollouts = weighted_rollouts(batch, self.algorithm, logprobs, values)
        hold = step <= self.config.steps_without_policy
        result = await self.trainer.step(rollouts, self.algorithm, hold)
        found = {"batch": batch, "rollouts": rollouts}
        if not result.stepped:
            check_finite(step, result.decisive, **found)
        self.trained_on = {"step": step, **found}
        check_finite(step, result.decisive)
        self.optimizer_steps += result.stepped
        self.pool.trained(batch, int(result.sums["tokens"]))
        figures, kl = metrics.training(result, self.config.optimizer.clip_norm), self.algorithm.kl
        if kl.target is not None:
            figures["kl_coef"] = kl.coef
            if result.stepped:
                coef = next_coefficient(kl.coef, figures["kl_reference"], kl.target, kl.gain)
                self.algorithm = self.algorithm.with_kl_coef(coef)
        return result, figures

    async def _ended_by(self, error: NotFinite) -> Exception:
        return await ended_by(
            getattr(error, "cause", error),  # without the stacks of the actor that met it
            self.writer,
            self.trainer,
            self.saver,
            record=self.record,
            state=self._state,
            trained_on=self.trained_on,
        )

    def _state(self) -> dict[str, Any]:
        return {
            "pool": self.pool.state(),
            "optimizer_steps": self.optimizer_steps,
            "dropped_in_a_row": self.dropped_in_a_row,
            "engine_tokens": self.engine_tokens,
            "kl_coef": self.algorithm.kl.coef,
            "reward_sums": self.reward_sums,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Take over what ``_state`` was, of a run with the same prompts."""
        self.pool.restore(state["pool"])
        self.optimizer_steps = state["optimizer_steps"]
        self.dropped_in_a_row = state["dropped_in_a_row"]
        self.reward_sums = state["reward_sums"]
        self.engine_tokens = Counter(state["engine_tokens"])
        self.tokens_before.update(self.engine_tokens)
        self.tokens_before["train"] = self.pool.tokens.generated
        if self.algorithm.kl.target is not None:
            self.algorithm = self.algorithm.with_kl_coef(state["kl_coef"])

    async def _refit(self, version: int) -> RefitReport:
        """Give the engines the trainer's weights as ``version``."""
        await self.workers.everywhere("pause")
        report = await self.trainer.send_weights(self.workers.workers)
        await self.workers.everywhere("resume", version)
        self.pool.version = version
        return report

    async def _probe(self, due: bool = False) -> ProbeResult | None:
        """Fresh tokens of the new version, scored by the trainer before its next step (invariant 4); None where none is due.

        The probe goes to the engines ahead of new groups, because the trainer waits for it; while it is scored the engines
        are at work on the new groups already (not under lockstep). The 99th percentile of few tokens is a rough figure: where
        it is in doubt, more are scored, and the record is of all of them.
        """
        if not due and self.pool.version % self.config.probe.every:
            if not self.pool.lockstep:
                self._dispatch()
            return None
        rows = await self.workers.fresh_tokens(self.pool.version, 0)
        if not self.pool.lockstep:
            self._dispatch()
        result = await self.trainer.score(rows)
        if result.p99 > self.config.probe.doubt_above:
            for part in range(1, 1 + DOUBTFUL_PROBE_PARTS):
                rows = await self.workers.fresh_tokens(self.pool.version, part)
                result = ProbeResult.joined([result, await self.trainer.score(rows)])
        check_finite(self.pool.version, {"largest difference of the probe": result.largest})
        return result

    def _evaluates(self, step: int) -> bool:
        return step % self.config.evaluation.every == 0 or step == self.config.loop.steps

    async def _evaluate(self) -> dict[str, float]:
        started = time.time()
        return metrics.evaluation(await self.workers.evaluate(), time.time() - started)

    async def _engine_clocks(self) -> list[tuple[float, float]]:
        """Stretches of decoding since the last call; ``engine_tokens`` is then of this moment."""
        stretches, tokens = await self.workers.clocks()
        self.engine_tokens = self.tokens_before + tokens
        return stretches

    async def _close_books(self) -> None:
        """At the end the engines' own count of training tokens equals the books', with what is left in flight."""
        await self._until(lambda: not self.pool.running)
        self.pool.check()
        await self._engine_clocks()
        generated = self.engine_tokens["train"]
        if generated != self.pool.tokens.generated:
            raise BooksError(
                f"the engines generated {generated} action tokens, the books know of {self.pool.tokens.generated}"
            )
