"""The processes that step one model together, as Ray actors, and the handle on all of them.

What a policy and a critic have in common: how ranks find each other, how rows are cut and their results put back in order,
and how state is saved, loaded and taken up again.
"""

from __future__ import annotations

import asyncio
import math
import resource
import socket
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import ray
import torch
import torch.distributed as dist

from molt_core.config import RunConfig
from molt_core.train.split import filler_row, split_rows
from molt_core.types import Trajectory

COLLECTIVE_TIMEOUT_S = 1800.0
"""Longest wait for a peer in a collective; loading a large checkpoint is in it."""

HEAP = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
"""For glibc, of a rank on a CPU: keep up to this many freed bytes. By default each step's memory goes back to the system and
comes again page by page, which takes up to a sixth of a small step's time."""


class Stepped(Protocol):
    """A model that is trained: what a checkpoint needs of it, see ``TrainBackend``."""

    data_rank: int
    data_size: int

    def save(self, folder: Path) -> Future: ...

    def load(self, folder: Path) -> None: ...


def memory_peak_bytes(device: str) -> int:
    """On a GPU the most that tensors took since the last call; on a CPU the most that the process took since it began."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


class Rank:
    """One process. ``start`` is collective over the ranks, as are all methods but ``address``."""

    def __init__(self, rank: int, config: RunConfig, checkpoint: Path) -> None:
        self.rank, self.config, self.checkpoint = rank, config, Path(checkpoint)
        self.stepped: dict[str, Stepped] = {}
        """The models that this process steps, by the folder of a checkpoint that each is saved in."""
        torch.set_num_threads(config.trainer.threads)

    def address(self) -> tuple[str, int]:
        """This host and a free port on it, for the ranks' rendezvous."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return host, probe.getsockname()[1]

    def start(self, host: str, port: int) -> tuple[int, int]:
        """Join the other ranks and load the models; returns (data_rank, data_size)."""
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
        dist.barrier()  # NCCL's first call has to be every rank's, and a refit's may be of some
        self.load_models()
        model = next(iter(self.stepped.values()))
        return model.data_rank, model.data_size

    def load_models(self) -> None:
        """Fill ``stepped``."""
        raise NotImplementedError

    def worth_a_step(self, loss: float, kept: float) -> bool:
        """Whether the loss is finite on every rank and a token was kept on some. Collective: all ranks agree."""
        total = torch.tensor([loss, kept], dtype=torch.float64, device=self.config.trainer.device)
        dist.all_reduce(total)
        return math.isfinite(total[0]) and bool(total[1] > 0)

    def begin_save(self, folder: Path) -> None:
        """Copy this rank's state and write it in the background; see ``TrainBackend.save``."""
        self._saving = [model.save(folder / name) for name, model in self.stepped.items()]

    @ray.method(concurrency_group="saving")
    def finish_save(self) -> None:
        """Wait until this rank's part is on disk; the rank may step meanwhile."""
        for saving in self._saving:
            saving.result()

    def load(self, folder: Path) -> None:
        """Go on from ``begin_save``."""
        for name, model in self.stepped.items():
            model.load(folder / name)


def added(sums: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over each share's tokens, by name, to sums over all."""
    total: dict[str, Any] = {}
    for of_share in sums:
        for name, value in of_share.items():
            total[name] = total.get(name, 0.0) + value
    return total


async def everywhere(ranks: Sequence[Any], method: str, *arguments: Any) -> list[Any]:
    """``method`` on each of ``ranks``; the results in their order."""
    return await asyncio.gather(*(getattr(rank, method).remote(*arguments) for rank in ranks))


class RankGroup:
    """All ranks of one kind. Create with ``await ...Group.start(...)``."""

    kind: type[Rank]

    def __init__(
        self, ranks: Sequence[Any], data_places: Sequence[tuple[int, int]], config: RunConfig
    ) -> None:
        """data_places: (data_rank, data_size) of each rank."""
        self.ranks, self.data_places, self.config = ranks, data_places, config
        self.data_ranks, self.data_size = [place[0] for place in data_places], data_places[0][1]

    @classmethod
    async def start(
        cls, config: RunConfig, checkpoint: Path, places: Sequence[Mapping[str, Any]]
    ) -> Self:
        """places: of each rank, the options of its actor (``placement.Reserved.ranks``)."""
        heap = HEAP if config.trainer.device == "cpu" else {}
        environment = {"OMP_NUM_THREADS": str(config.trainer.threads), **heap}
        remote = ray.remote(concurrency_groups={"saving": 1}, runtime_env={"env_vars": environment})
        ranks = [
            remote(cls.kind).options(**place).remote(rank, config, checkpoint)
            for rank, place in enumerate(places)
        ]
        host, port = await ranks[0].address.remote()
        return cls(ranks, await everywhere(ranks, "start", host, port), config)

    async def on_shares(self, method: str, shares: Sequence[Any], *arguments: Any) -> list[Any]:
        """``method`` on every rank with the share of its place; the results in the order of ranks."""
        stored = [ray.put(share) for share in shares]
        return await asyncio.gather(
            *(
                getattr(rank, method).remote(stored[d], *arguments)
                for rank, d in zip(self.ranks, self.data_ranks)
            )
        )

    def of_shares(self, results: Sequence[Any]) -> list[Any]:
        """Of results by rank one a share, in the order of shares: ranks of one place have the same."""
        by_share = dict(zip(self.data_ranks, results))
        return [by_share[d] for d in range(self.data_size)]

    async def on_rows(
        self, method: str, rows: Sequence[Trajectory], *arguments: Any
    ) -> dict[str, np.ndarray]:
        """What ``method`` finds for the rows' sampled tokens: by name ``[N]``, in the order of ``rows``.

        method: from micro-batches of rows, and ``arguments``, to one array a row by name.
        """
        split = split_rows(rows, self.data_size, self.config.trainer)
        filled = [
            [[rows[i] for i in part] or [filler_row(rows[0])] for part in share] for share in split
        ]
        by_share = self.of_shares(await self.on_shares(method, filled, *arguments))
        flat: dict[str, np.ndarray] = {}
        for name in by_share[0]:
            of_row: dict[int, np.ndarray] = {}
            for share, found in zip(split, by_share):
                # A filler row stands where a micro-batch is empty.
                places = [i for part in share for i in (part or [-1])]
                of_row |= dict(zip(places, found[name], strict=True))
            flat[name] = np.concatenate([of_row[i] for i in range(len(rows))])
        return flat
