"""Trainer ranks as Ray actors, and the loop's handle on all of them.

A rank owns one backend, and a critic where that is colocated. The group cuts a batch into shares, runs every rank, adds up
what they return. Rank 0 also owns the refit group to the engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import ray
import torch
import torch.distributed as dist

from molt_core.algo.aggregation import WeightedRollout
from molt_core.algo.config import AlgorithmConfig
from molt_core.algo.registry import load_plugins
from molt_core.config import ModelConfig, RunConfig
from molt_core.models.load import atomic_folder, check_same_tokens, excluded_token_ids, save_policy
from molt_core.rollout import refit
from molt_core.train.backend import TrainBackend, backend_class, can_step
from molt_core.train.critic import CriticGroup, CriticRank
from molt_core.train.logprobs import ActionDistribution
from molt_core.train.objective import forward_backward, row_logprobs, score
from molt_core.train.ranks import RankGroup, added, everywhere, memory_peak_bytes
from molt_core.train.results import ProbeResult, StepResult
from molt_core.train.routing import check_recorded
from molt_core.train.split import shares
from molt_core.train.weights import whole_weights
from molt_core.types import Batch, ContractError, Trajectory

TIMEOUT_S = 120.0
"""Longest wait for a peer in a refit."""


class TrainerRank(CriticRank):
    """One process of the trainer; see ``Rank``. The one that holds the policy, and the critic where that is colocated."""

    def __init__(self, rank: int, config: RunConfig, checkpoint: Path) -> None:
        super().__init__(rank, config, checkpoint)
        self.engines_know: frozenset[str] = frozenset()

    def load_models(self) -> None:
        load_plugins(self.config.algorithm.plugins)
        config = self.config
        steps = config.loop.steps - config.steps_without_policy
        self.backend = self.stepped[""] = self._backend(self.checkpoint, config.model, steps)
        excluded, device = excluded_token_ids(self.checkpoint), config.trainer.device
        self.distribution = ActionDistribution(
            config.rollout.sampling.temperature,
            torch.tensor(excluded, dtype=torch.long, device=device),
        )
        frozen = {name: self._frozen(name) for name in config.algorithm.frozen_policies}
        self.policies = {"policy": self.backend, **frozen}
        if config.critic is not None and config.critic.placement == "colocated":
            super().load_models()

    def _backend(self, checkpoint: Path, model: ModelConfig, steps: int) -> TrainBackend:
        config = self.config
        build = backend_class(config.trainer.backend)
        return build(checkpoint, model, config.optimizer, config.trainer, steps)

    def _frozen(self, name: str) -> TrainBackend:
        """A policy that is scored and never stepped, in the trainer's own layout: weights of the same size again.

        It routes as it would: the record of another policy's routing is not replayed.
        """
        teacher = self.config.algorithm.teacher
        model = self.config.model.model_copy(update={"routing_replay": False})
        folder = self.checkpoint if name == "reference" else Path(teacher)
        check_same_tokens(self.checkpoint, folder)
        return self._backend(folder, model, steps=0)

    def step(
        self,
        micro_batches: Sequence[Sequence[WeightedRollout]],
        algorithm: AlgorithmConfig,
        hold: bool = False,
    ) -> StepResult:
        """algorithm: this step's, in which ``kl.coef`` may be another than at the last. hold: measure all and step nothing."""
        self.accumulate(micro_batches, algorithm)
        return self.finish(hold)

    def accumulate(
        self, micro_batches: Sequence[Sequence[WeightedRollout]], algorithm: AlgorithmConfig
    ) -> None:
        """A step up to its gradient; ``finish`` is the rest, for whom has to wait for something in between."""
        self.started = time.time()
        self.sums = forward_backward(
            self.backend,
            micro_batches,
            algorithm=algorithm,
            distribution=self.distribution,
        )
        self.accumulated = time.time()

    def finish(self, hold: bool) -> StepResult:
        sums, began = self.sums, time.time()
        apply = self.worth_a_step(sums["loss"], sums["tokens_kept"]) and not hold
        norm = self.backend.optimizer_step(apply)
        ended = time.time()
        stepped = apply and can_step(norm)
        return StepResult(
            sums,
            norm,
            stepped,
            self.accumulated - self.started,
            ended - began,
            self.started,
            ended,
            self.backend.update_ratio() if stepped else None,
            memory_peak_bytes(self.config.trainer.device),
        )

    def logprobs(
        self, micro_batches: Sequence[Sequence[Trajectory]], policies: Sequence[str]
    ) -> dict[str, list[np.ndarray]]:
        """By policy, of every row of the micro-batches in order: its sampled tokens' log-probabilities."""
        return {
            name: [
                values
                for rows in micro_batches
                for values in row_logprobs(self.policies[name], rows, self.distribution)
            ]
            for name in policies
        }

    def score(self, micro_batches: Sequence[Sequence[Trajectory]]) -> dict[str, list[np.ndarray]]:
        """Of every row of the micro-batches in order: |trainer - engine| log-probability of its sampled tokens under
        "differences", and under "tied" whether a router before them was undecided (``objective.score``).
        """
        found: dict[str, list[np.ndarray]] = {"differences": [], "tied": []}
        for rows in micro_batches:
            batch, logprobs, tied = score(
                self.backend,
                rows,
                distribution=self.distribution,
                tie_gap=self.config.probe.tie_gap,
            )
            differences = (logprobs - batch.behaviour_logprobs).abs()
            ends = np.cumsum([row.action_tokens for row in rows])[:-1]
            for name, values in (("differences", differences), ("tied", tied)):
                found[name] += np.split(values.cpu().numpy(), ends)
        return found

    def begin_save(self, folder: Path) -> None:
        streams = {"cpu": torch.get_rng_state()}
        if self.config.trainer.device == "cuda":
            streams["cuda"] = torch.cuda.get_rng_state()
        torch.save(streams, self._streams(folder))
        super().begin_save(folder)

    def load(self, folder: Path) -> None:
        """A rank that the saving trainer did not have keeps its fresh random streams."""
        super().load(folder)
        if self._streams(folder).exists():
            streams = torch.load(self._streams(folder))
            torch.set_rng_state(streams["cpu"])
            if "cuda" in streams and self.config.trainer.device == "cuda":
                torch.cuda.set_rng_state(streams["cuda"])

    def _streams(self, folder: Path) -> Path:
        return folder / f"random-{self.rank}.pt"

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder (rank 0), whole or not at all."""
        weights = whole_weights(self.backend.weights())
        if self.rank != 0:
            for _ in weights:  # sends its rows
                pass
            return
        with atomic_folder(folder) as scratch:
            save_policy(weights, self.checkpoint, scratch)

    def open_refit(self) -> tuple[str, int]:
        """Rank 0: listen for the engines; returns where."""
        self.store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return ray.util.get_node_ip_address(), self.store.port

    def join_refit(self, size: int) -> None:
        device = torch.device(self.config.trainer.device)
        self.refit_group = refit.join_group(self.store, 0, size, device, TIMEOUT_S)
        self.expected_names = refit.checkpoint_names(self.checkpoint)

    def send_weights(self, engines: Sequence[Any]) -> refit.RefitReport | None:
        """Rank 0 sends, the other ranks give it the rows that they hold. What is frozen goes out the first time only."""
        known, self.engines_know = self.engines_know, self.backend.frozen
        weights = self.backend.weights(leave_out=known)
        if self.rank != 0:
            return refit.take_part(weights)

        def announce(description: dict):
            answers = [engine.receive.remote(description) for engine in engines]
            return lambda: ray.get(answers, timeout=TIMEOUT_S)

        return refit.send(self.refit_group, weights, announce, self.expected_names - known)


class TrainerGroup(RankGroup):
    """All ranks, and the critic's, as the loop sees them."""

    kind = TrainerRank

    @classmethod
    async def start(
        cls, config: RunConfig, checkpoint: Path, places: Sequence[Mapping[str, Any]]
    ) -> Self:
        """places: those of a separate critic's ranks come after the trainer's own."""
        own = config.trainer.world_size
        group = await super().start(config, checkpoint, places[:own])
        group.critic, group.processes = None, group.ranks
        if config.critic is not None and config.critic.placement == "separate":
            group.critic = await CriticGroup.start(config, checkpoint, places[own:])
            group.processes = [*group.ranks, *group.critic.ranks]
        elif config.critic is not None:
            group.critic = CriticGroup(group.ranks, group.data_places, config)
        return group

    async def step(
        self, rollouts: Sequence[WeightedRollout], algorithm: AlgorithmConfig, hold: bool = False
    ) -> StepResult:
        """One step of the policy by ``algorithm``, unless it is on hold, and those of the critic.

        The policy's comes last, and not at all where the critic's numbers are not finite: who diverges stops both.
        Raises ValueError where routing is to be replayed and no row has a record of it.
        """
        if self.config.model.routing_replay:
            check_recorded(segment for one in rollouts for segment in one.segments)
        split = shares(rollouts, self.data_size, self.config.trainer)
        if self.critic is None:
            return self._joined(await self.on_shares("step", split, algorithm, hold))
        apart, waiting = len(self.processes) > len(self.ranks), time.time()
        of_critic = asyncio.create_task(self.critic.step(rollouts))
        if apart:  # at the same time; else one after the other
            await self.on_shares("accumulate", split, algorithm)
            waiting = time.time()
        critic = await of_critic
        critic_s = self._values_s + time.time() - waiting
        hold = hold or not np.isfinite(list(critic.decisive.values())).all()
        if apart:
            result = self._joined(await everywhere(self.ranks, "finish", hold))
        else:
            result = self._joined(await self.on_shares("step", split, algorithm, hold))
        return replace(
            result,
            critic=critic,
            critic_s=critic_s,
            memory_peak_bytes=max(result.memory_peak_bytes, critic.memory_peak_bytes),
        )

    def _joined(self, results: Sequence[StepResult]) -> StepResult:
        return StepResult(
            added(result.sums for result in self.of_shares(results)),
            results[0].grad_norm,
            results[0].stepped,
            max(r.forward_backward_s for r in results),
            max(r.optimizer_s for r in results),
            min(r.started for r in results),
            max(r.ended for r in results),
            results[0].update_ratio,
            max(r.memory_peak_bytes for r in results),
        )

    async def logprobs(self, rows: Sequence[Trajectory]) -> dict[str, np.ndarray]:
        """Log-probabilities ``[N]`` of the rows' sampled tokens, in order, by each of ``algorithm.scored_policies``.

        Raises ContractError where one that is never stepped gives no number.
        """
        algorithm = self.config.algorithm
        if not algorithm.scored_policies:
            return {}
        found = await self.on_rows("logprobs", rows, algorithm.scored_policies)
        for name in algorithm.frozen_policies:
            if not np.isfinite(found[name]).all():
                raise ContractError(
                    f"the {name} gives a sampled token a log-probability that is no number: see its weights and model.dtype"
                )
        return found

    async def values(self, rows: Sequence[Trajectory]) -> np.ndarray | None:
        """The critic's values ``[N]`` before the rows' sampled tokens, in order; None without a critic."""
        if self.critic is None:
            return None
        started = time.time()
        values = await self.critic.values(rows)
        self._values_s = time.time() - started
        return values

    async def gives_numbers(self, batch: Batch) -> bool:
        """Whether policy and critic, as they are, have a finite number for every sampled token."""
        rows = [segment for group in batch.groups for segment in group.segments]
        by_policy = await self.on_rows("logprobs", rows, ("policy",))
        found = [by_policy["policy"], await self.values(rows)]
        return all(np.isfinite(numbers).all() for numbers in found if numbers is not None)

    async def score(self, rows: Sequence[Trajectory]) -> ProbeResult:
        found = await self.on_rows("score", rows)
        return ProbeResult.of(**found, doubt_above=self.config.probe.doubt_above)

    async def begin_save(self, folder: Path) -> None:
        await everywhere(self.processes, "begin_save", folder)

    async def finish_save(self) -> None:
        await everywhere(self.processes, "finish_save")

    async def load(self, folder: Path) -> None:
        await everywhere(self.processes, "load", folder)

    async def export(self, folder: Path) -> None:
        await everywhere(self.ranks, "export", folder)

    async def connect(self, engines: Sequence[Any], workers_per_engine: int) -> None:
        """Open the refit group between rank 0 and every engine worker."""
        size = 1 + len(engines) * workers_per_engine
        host, port = await self.ranks[0].open_refit.remote()
        joins = [
            engine.join.remote(
                {
                    "host": host,
                    "port": port,
                    "first_rank": 1 + number * workers_per_engine,
                    "size": size,
                    "timeout_s": TIMEOUT_S,
                }
            )
            for number, engine in enumerate(engines)
        ]
        await asyncio.gather(self.ranks[0].join_refit.remote(size), *joins)

    async def send_weights(self, engines: Sequence[Any]) -> refit.RefitReport:
        return (await everywhere(self.ranks, "send_weights", engines))[0]
