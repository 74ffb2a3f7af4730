"""Trainer ranks as Ray actors, and the loop's handle on all of them.

A rank owns one backend. The group cuts a batch into shares, runs every rank, adds up what they return. Rank 0 also owns the
refit group to the engines.
"""

from __future__ import annotations

import asyncio
import math
import resource
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist

from molt_core.algo.aggregation import WeightedRollout
from molt_core.algo.registry import load_plugins
from molt_core.config import ModelConfig, RunConfig
from molt_core.models.layout import to_published
from molt_core.models.load import atomic_folder, excluded_token_ids, save_policy
from molt_core.rollout import refit
from molt_core.train.backend import TrainBackend, backend_class, can_step
from molt_core.train.logprobs import ActionDistribution
from molt_core.train.objective import forward_backward, row_logprobs, score
from molt_core.train.split import shares, split_rows, split_units, without_actions
from molt_core.types import Trajectory

TIMEOUT_S = 120.0
"""Longest wait for a peer in a refit."""
COLLECTIVE_TIMEOUT_S = 1800.0
"""Longest wait for a peer in a collective of the trainer; loading a large checkpoint is in it."""


@dataclass(frozen=True)
class StepResult:
    """One optimiser step. ``sums`` over all action tokens of the batch (see ``objective.forward_backward``).

    stepped: False where the optimiser was left alone, because loss or gradient norm is not finite or nothing was kept.
    update_ratio: norm of the step over that of the weights, None without one. memory_peak_bytes: of the rank with the most.
    """

    sums: Mapping[str, Any]
    grad_norm: float
    stepped: bool
    forward_backward_s: float
    optimizer_s: float
    started: float
    ended: float
    update_ratio: float | None = None
    memory_peak_bytes: int = 0


@dataclass(frozen=True)
class ProbeResult:
    """|trainer - engine| log-probability of fresh tokens, tied ones left out; how many were tied."""

    differences: np.ndarray
    tied: int

    @classmethod
    def joined(cls, parts: Collection[ProbeResult]) -> ProbeResult:
        return cls(np.concatenate([p.differences for p in parts]), sum(p.tied for p in parts))

    @property
    def p99(self) -> float:
        """0 where every token was tied."""
        return (
            float(np.quantile(self.differences.astype(np.float64), 0.99))
            if len(self.differences)
            else 0.0
        )


def memory_peak_bytes(device: str) -> int:
    """On a GPU the most that tensors took since the last call; on a CPU the most that the process took since it began."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


class TrainerRank:
    """One process of the trainer. ``start`` is collective over the ranks, as are all methods but ``address``."""

    def __init__(self, rank: int, config: RunConfig, checkpoint: Path) -> None:
        self.rank, self.config, self.checkpoint = rank, config, Path(checkpoint)
        self.engines_know: frozenset[str] = frozenset()
        torch.set_num_threads(config.trainer.threads)

    def address(self) -> tuple[str, int]:
        """This host and a free port on it, for the ranks' rendezvous."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return host, probe.getsockname()[1]

    def start(self, host: str, port: int) -> tuple[int, int]:
        """Join the other ranks and build the backend; returns (data_rank, data_size)."""
        load_plugins(self.config.algorithm.plugins)
        trainer = self.config.trainer
        if trainer.device == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group(
            "nccl" if trainer.device == "cuda" else "gloo",
            init_method=f"tcp://{host}:{port}",
            rank=self.rank,
            world_size=trainer.world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        self.backend = self._backend(self.checkpoint, self.config.model)
        self.distribution = ActionDistribution(
            self.config.rollout.sampling.temperature,
            torch.tensor(
                excluded_token_ids(self.checkpoint), dtype=torch.long, device=trainer.device
            ),
        )
        self.frozen = {name: self._frozen(name) for name in self.config.algorithm.frozen_policies}
        return self.backend.data_rank, self.backend.data_size

    def _backend(self, checkpoint: Path, model: ModelConfig) -> TrainBackend:
        config = self.config
        return backend_class(config.trainer.backend)(
            checkpoint, model, config.optimizer, config.trainer, config.loop.steps
        )

    def _frozen(self, name: str) -> TrainBackend:
        """A policy that is scored and never stepped, in the trainer's own layout: weights of the same size again.

        It routes as it would: the record of another policy's routing is not replayed.
        """
        teacher = self.config.algorithm.teacher
        model = self.config.model.model_copy(update={"routing_replay": False})
        return self._backend(self.checkpoint if name == "reference" else Path(teacher), model)

    def step(self, micro_batches: Sequence[Sequence[WeightedRollout]]) -> StepResult:
        started = time.time()
        sums = forward_backward(
            self.backend,
            micro_batches,
            algorithm=self.config.algorithm,
            distribution=self.distribution,
        )
        middle = time.time()
        apply = self._worth_a_step(sums["loss"], sums["tokens_kept"])
        norm = self.backend.optimizer_step(apply)
        ended = time.time()
        stepped = apply and can_step(norm)
        return StepResult(
            sums,
            norm,
            stepped,
            middle - started,
            ended - middle,
            started,
            ended,
            self.backend.update_ratio() if stepped else None,
            memory_peak_bytes(self.config.trainer.device),
        )

    def _worth_a_step(self, loss: float, kept: float) -> bool:
        """Whether the loss is finite on every rank and the correction kept a token on some. Collective: all ranks agree."""
        total = torch.tensor([loss, kept], dtype=torch.float64, device=self.config.trainer.device)
        dist.all_reduce(total)
        return math.isfinite(total[0]) and bool(total[1] > 0)

    def frozen_logprobs(
        self, micro_batches: Sequence[Sequence[Trajectory]]
    ) -> dict[str, list[np.ndarray]]:
        """By frozen policy, of every row of the micro-batches in order: its sampled tokens' log-probabilities."""
        return {
            name: [
                values
                for rows in micro_batches
                for values in row_logprobs(policy, rows, self.distribution)
            ]
            for name, policy in self.frozen.items()
        }

    def score(self, rows: Sequence[Trajectory]) -> ProbeResult:
        batch, logprobs, tied = score(
            self.backend,
            rows,
            distribution=self.distribution,
            tie_gap=self.config.probe.tie_gap,
        )
        differences = (logprobs - batch.behaviour_logprobs).abs()[~tied]
        return ProbeResult(differences.cpu().numpy(), int(tied.sum()))

    def begin_save(self, folder: Path) -> None:
        """Copy this rank's state and write it in the background; see ``TrainBackend.save``."""
        streams = {"cpu": torch.get_rng_state()}
        if self.config.trainer.device == "cuda":
            streams["cuda"] = torch.cuda.get_rng_state()
        torch.save(streams, self._streams(folder))
        self._saving = self.backend.save(folder)

    @ray.method(concurrency_group="saving")
    def finish_save(self) -> None:
        """Wait until this rank's part is on disk; the rank may step meanwhile."""
        self._saving.result()

    def load(self, folder: Path) -> None:
        """Go on from ``begin_save``. A rank that the saving trainer did not have keeps its fresh random streams."""
        self.backend.load(folder)
        if self._streams(folder).exists():
            streams = torch.load(self._streams(folder))
            torch.set_rng_state(streams["cpu"])
            if "cuda" in streams and self.config.trainer.device == "cuda":
                torch.cuda.set_rng_state(streams["cuda"])

    def _streams(self, folder: Path) -> Path:
        return folder / f"random-{self.rank}.pt"

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder (rank 0), whole or not at all."""
        if self.rank != 0:
            for _ in self.backend.named_weights():
                pass
            return
        with atomic_folder(folder) as scratch:
            save_policy(self.backend.named_weights(), self.checkpoint, scratch)

    def open_refit(self) -> tuple[str, int]:
        """Rank 0: listen for the engines; returns where."""
        self.store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return ray.util.get_node_ip_address(), self.store.port

    def join_refit(self, size: int) -> None:
        device = torch.device(self.config.trainer.device)
        self.refit_group = refit.join_group(self.store, 0, size, device, TIMEOUT_S)
        self.expected_names = refit.checkpoint_names(self.checkpoint)

    def send_weights(self, engines: Sequence[Any]) -> refit.RefitReport | None:
        """Rank 0 sends, the other ranks take part in gathering each tensor. What is frozen goes out the first time only."""
        known, self.engines_know = self.engines_know, self.backend.frozen
        weights = self.backend.named_weights(leave_out=known)
        if self.rank != 0:
            for _ in weights:
                pass
            return None

        def announce(description: dict):
            answers = [engine.receive.remote(description) for engine in engines]
            return lambda: ray.get(answers, timeout=TIMEOUT_S)

        published = ((name, to_published(name, tensor)) for name, tensor in weights)
        return refit.send(self.refit_group, published, announce, self.expected_names - known)


class TrainerGroup:
    """All ranks, as the loop sees them. Create with ``await TrainerGroup.start(...)``."""

    def __init__(self, ranks: Sequence[Any], config: RunConfig) -> None:
        self.ranks, self.config = ranks, config

    @classmethod
    async def start(
        cls, config: RunConfig, checkpoint: Path, places: Sequence[Mapping[str, Any]]
    ) -> TrainerGroup:
        """places: of each rank, the options of its actor (``placement.Reserved.ranks``)."""
        threads = {"OMP_NUM_THREADS": str(config.trainer.threads)}
        remote = ray.remote(concurrency_groups={"saving": 1}, runtime_env={"env_vars": threads})
        ranks = [
            remote(TrainerRank).options(**place).remote(rank, config, checkpoint)
            for rank, place in enumerate(places)
        ]
        group = cls(ranks, config)
        host, port = await ranks[0].address.remote()
        places = await asyncio.gather(*(rank.start.remote(host, port) for rank in ranks))
        group.data_ranks = [place[0] for place in places]
        group.data_size = places[0][1]
        return group

    async def step(self, rollouts: Sequence[WeightedRollout]) -> StepResult:
        split = shares(rollouts, self.data_size, self.config.trainer)
        stored = [ray.put(micro_batches) for micro_batches in split]
        results: list[StepResult] = await asyncio.gather(
            *(rank.step.remote(stored[d]) for rank, d in zip(self.ranks, self.data_ranks))
        )
        sums: dict[str, Any] = {}
        for _, result in sorted(dict(zip(self.data_ranks, results)).items()):
            for name, value in result.sums.items():
                sums[name] = sums.get(name, 0.0) + value
        return StepResult(
            sums,
            results[0].grad_norm,
            results[0].stepped,
            max(r.forward_backward_s for r in results),
            max(r.optimizer_s for r in results),
            min(r.started for r in results),
            max(r.ended for r in results),
            results[0].update_ratio,
            max(r.memory_peak_bytes for r in results),
        )

    async def frozen_logprobs(self, rows: Sequence[Trajectory]) -> dict[str, np.ndarray]:
        """Log-probabilities ``[N]`` of the rows' sampled tokens, in order, by each of ``algorithm.frozen_policies``."""
        names = self.config.algorithm.frozen_policies
        if not names:
            return {}
        split = split_rows(rows, self.data_size, self.config.trainer)
        stored = [
            ray.put([[rows[i] for i in part] or [without_actions(rows[0])] for part in share])
            for share in split
        ]
        results = await asyncio.gather(
            *(
                rank.frozen_logprobs.remote(stored[d])
                for rank, d in zip(self.ranks, self.data_ranks)
            )
        )
        by_share = dict(zip(self.data_ranks, results))
        flat: dict[str, np.ndarray] = {}
        for name in names:
            of_row: dict[int, np.ndarray] = {}
            for d, share in enumerate(split):
                # A filler row stands where a micro-batch is empty.
                places = [i for part in share for i in (part or [-1])]
                of_row |= dict(zip(places, by_share[d][name], strict=True))
            flat[name] = np.concatenate([of_row[i] for i in range(len(rows))])
        return flat

    async def score(self, rows: Sequence[Trajectory]) -> ProbeResult:
        lengths = [len(row.token_ids) for row in rows]
        split = split_units(lengths, self.data_size, max_rows=len(rows))
        stored = [
            ray.put([rows[i] for i in share[0]] or [without_actions(rows[0])]) for share in split
        ]
        results = await asyncio.gather(
            *(rank.score.remote(stored[d]) for rank, d in zip(self.ranks, self.data_ranks))
        )
        return ProbeResult.joined(dict(zip(self.data_ranks, results)).values())

    async def begin_save(self, folder: Path) -> None:
        await asyncio.gather(*(rank.begin_save.remote(folder) for rank in self.ranks))

    async def finish_save(self) -> None:
        await asyncio.gather(*(rank.finish_save.remote() for rank in self.ranks))

    async def load(self, folder: Path) -> None:
        await asyncio.gather(*(rank.load.remote(folder) for rank in self.ranks))

    async def export(self, folder: Path) -> None:
        await asyncio.gather(*(rank.export.remote(folder) for rank in self.ranks))

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
        reports = await asyncio.gather(*(rank.send_weights.remote(engines) for rank in self.ranks))
        return reports[0]
