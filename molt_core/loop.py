"""The one asynchronous loop: agents generate, the trainer steps, the engines are refitted, all at once.

    dispatch -> [engines: agents generate] -> pool -> batch -> [trainer: one step] -> refit -> probe -> dispatch

The engines go on generating while the trainer steps; a refit freezes requests where they are, and they go on under
the new weights. Synchronous training is this loop with ``max_staleness: 0``, lockstep is this loop with a fixed order. The
loop keeps the books (``rollout/pool.py``) and stops where they do not close.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import ray

from molt_core import metrics
from molt_core.algo.aggregation import weighted_rollouts
from molt_core.config import RunConfig
from molt_core.data import prompt_source
from molt_core.rollout.pool import BooksError, Pool
from molt_core.rollout.worker import RolloutWorker
from molt_core.train.worker import ProbeResult, TrainerGroup
from molt_core.types import Batch, ContractError, Group, Trajectory

FUTILE_BATCHES = 8
"""Batches' worth of groups dropped in a row, without one kept, after which a run gives up."""


class Diverged(RuntimeError):
    """Loss or gradient norm is not finite. Noticed before the optimiser steps: the weights are those of the step before."""


class EverythingDropped(RuntimeError):
    """No group survives the filters; training on nothing would look like a run."""


class Loop:
    """One run. ``await Loop(...).run()`` trains ``config.loop.steps`` steps and leaves its record in ``writer``."""

    def __init__(self, config: RunConfig, checkpoint: Path, writer: metrics.RunWriter) -> None:
        self.config, self.checkpoint, self.writer = config, checkpoint, writer
        prompts = prompt_source(config.task, "train", config.seed)
        self.pool = Pool(config.rollout, config.loop, lambda index: prompts.item(index).prompt_id)
        self.changed = asyncio.Event()
        self.tasks: set[asyncio.Task] = set()
        self.dropped_in_a_row = 0
        self.failure: BaseException | None = None
        self.reward_sums = metrics.RewardSums()
        self.optimizer_steps = 0

    async def run(self) -> None:
        self.writer.heartbeat("starting", 0)
        await self._start()
        try:
            await self._refit()
            probe = await self._probe_and_dispatch()
            self.writer.record(
                {"step": 0, "phase": "initial", **metrics.probe(probe), **await self._evaluate()}
            )
            self.step_started = time.time()
            for step in range(1, self.config.loop.steps + 1):
                self.writer.heartbeat("training", step - 1)
                await self._step(step)
            await self._close_books()
            await self.trainer.export(self.writer.policy_folder)
        finally:
            for task in self.tasks:
                task.cancel()
            ends = (worker.shutdown.remote() for worker in self.workers)
            await asyncio.gather(
                *ends, return_exceptions=True
            )  # a dead engine must not hide why it died
        self.writer.heartbeat("finished", self.config.loop.steps)

    async def _start(self) -> None:
        """Bring up engines and trainer side by side and connect them."""
        engine = self.config.engine
        gpus = engine.tensor_parallel if engine.device == "cuda" else 0
        threads = {"OMP_NUM_THREADS": str(engine.threads)}
        remote = ray.remote(
            num_cpus=1, num_gpus=gpus, max_concurrency=1000, runtime_env={"env_vars": threads}
        )(RolloutWorker)
        self.workers = [remote.remote(self.config, self.checkpoint) for _ in range(engine.count)]
        self.trainer, *_ = await asyncio.gather(
            TrainerGroup.start(self.config, self.checkpoint),
            *(worker.start.remote() for worker in self.workers),
        )
        await self.trainer.connect(self.workers, engine.tensor_parallel)

    # Generation

    def _dispatch(self) -> None:
        for index in self.pool.dispatch():
            worker = self.workers[index % len(self.workers)]
            task = asyncio.create_task(self._generate(worker, index, self.pool.version))
            self.tasks.add(task)
            task.add_done_callback(self._generated)

    async def _generate(self, worker: Any, index: int, version: int) -> Group:
        return await worker.rollout.remote(index, version)

    def _generated(self, task: asyncio.Task) -> None:
        """A group has arrived: book it, replace it where it was dropped, wake the trainer."""
        self.tasks.discard(task)
        if task.cancelled():
            return
        if task.exception() is not None:
            self.failure = self.failure or task.exception()
        else:
            group = task.result()
            self.reward_sums.add(group)
            dropped = self.pool.finish(group)
            self.dropped_in_a_row = self.dropped_in_a_row + 1 if dropped else 0
            self._dispatch()
        self.changed.set()

    async def _until(self, condition) -> Any:
        """Wait for groups to arrive until ``condition()`` is true; raises what a generation task raised."""
        while True:
            if self.failure is not None:
                raise self.failure
            if self.dropped_in_a_row >= FUTILE_BATCHES * self.pool.size:
                raise EverythingDropped(
                    f"the last {self.dropped_in_a_row} groups were all dropped: {dict(self.pool.groups.dropped)}"
                )
            value = condition()
            if value:
                return value
            self.changed.clear()
            await self.changed.wait()

    # Training

    async def _step(self, step: int) -> None:
        waiting = time.time()
        batch: Batch = await self._until(self.pool.take)
        lags = self.pool.lags(batch)
        waited = time.time() - waiting
        frozen = await self.trainer.frozen_logprobs(
            [segment for group in batch.groups for segment in group.segments]
        )
        rollouts = weighted_rollouts(batch, self.config.algorithm, frozen)
        result = await self.trainer.step(rollouts)
        if not np.isfinite([result.sums["loss"], result.grad_norm]).all():
            what = f"step {step}: loss {result.sums['loss']}, gradient norm {result.grad_norm}"
            file = self.writer.dump(
                "diverged_batch.pkl", {"reason": what, "batch": batch, "rollouts": rollouts}
            )
            raise Diverged(f"{what}; the step was not taken, its batch is in {file}")
        self.optimizer_steps += result.stepped
        self.pool.trained(batch, int(result.sums["tokens"]))
        if self.pool.lockstep:
            waiting = time.time()
            await self._until(lambda: not self.pool.running)
            waited += time.time() - waiting
        refit_started = time.time()
        refit = await self._refit()
        refit_s = time.time() - refit_started
        probe_started = time.time()
        probe = await self._probe_and_dispatch()
        probe_s = time.time() - probe_started
        if self._evaluates(step):
            self.writer.heartbeat("evaluating", step)
        evaluation = await self._evaluate() if self._evaluates(step) else {}
        busy, engine_tokens = await self._engine_clocks()
        self.pool.check()
        dispatch_hash, trained_hash = self.pool.fingerprints(step)
        ended = time.time()
        self.writer.record(
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
                "devices": self._devices(),
                "policy_version": self.pool.version,
                "lag_mean": float(lags.mean()),
                "lag_max": int(lags.max()),
                "prompts_fingerprint": dispatch_hash,
                "trained_fingerprint": trained_hash,
                **metrics.books(self.pool),
                "tokens_evaluation": engine_tokens["eval"],
                "tokens_probe": engine_tokens["probe"],
                **metrics.batch(batch),
                **metrics.training(result, self.config.optimizer.clip_norm),
                **self.reward_sums.take(),
                **(metrics.probe(probe) if probe else {}),
                **evaluation,
            }
        )
        self.step_started = ended

    async def _refit(self):
        """Give the engines the trainer's weights. The first one, before any step, is version 0 again: an identity."""
        version = self.pool.version + 1 if self.pool.groups.trained else 0
        await asyncio.gather(*(worker.pause.remote() for worker in self.workers))
        report = await self.trainer.send_weights(self.workers)
        await asyncio.gather(*(worker.resume.remote(version) for worker in self.workers))
        self.pool.version = version
        return report

    async def _probe_and_dispatch(self) -> ProbeResult | None:
        """Fresh tokens of the new version, scored by the trainer before its next step (invariant 4); None where none is due.

        The probe goes to the engines ahead of new groups, because the trainer waits for it; while it is scored the engines
        are at work on the new groups already.
        """
        rows: list[Trajectory] = []
        if self.pool.version % self.config.probe.every == 0:
            length = min(self.config.probe.new_tokens, self.config.rollout.sampling.max_new_tokens)
            count = -(-self.config.probe.tokens // length)
            each = -(-count // len(self.workers))
            probes = await asyncio.gather(
                *(worker.probe.remote(each, self.pool.version) for worker in self.workers)
            )
            rows = [row for probe in probes for row in probe]
            if sum(row.action_tokens for row in rows) < self.config.probe.tokens:
                raise ContractError(
                    f"a probe of {self.config.probe.tokens} tokens had room for fewer; raise model.max_length"
                )
        self._dispatch()
        return await self.trainer.score(rows) if rows else None

    def _evaluates(self, step: int) -> bool:
        return step % self.config.evaluation.every == 0 or step == self.config.loop.steps

    async def _evaluate(self) -> dict[str, float]:
        started = time.time()
        indices = np.arange(self.config.task.eval_items)
        shares = np.array_split(indices, len(self.workers))
        results = await asyncio.gather(
            *(worker.evaluate.remote(share.tolist()) for worker, share in zip(self.workers, shares))
        )
        return metrics.evaluation([r for share in results for r in share], time.time() - started)

    async def _engine_clocks(self) -> tuple[list[tuple[float, float]], Counter[str]]:
        """Stretches of decoding since the last call, and tokens sampled so far by what they were for."""
        clocks = await asyncio.gather(*(worker.busy.remote() for worker in self.workers))
        tokens = sum((Counter(tokens) for _, tokens in clocks), Counter())
        return [stretch for stretches, _ in clocks for stretch in stretches], tokens

    def _devices(self) -> int:
        engine = self.config.engine
        return self.config.trainer.world_size + engine.count * engine.tensor_parallel

    async def _close_books(self) -> None:
        """At the end the engines' own count of training tokens equals the books', with what is left in flight."""
        await self._until(lambda: not self.pool.running)
        self.pool.check()
        _, engine_tokens = await self._engine_clocks()
        generated = engine_tokens["train"]
        if generated != self.pool.tokens.generated:
            raise BooksError(
                f"the engines generated {generated} action tokens, the books know of {self.pool.tokens.generated}"
            )
