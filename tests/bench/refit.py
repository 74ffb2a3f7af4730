"""What a refit costs over a plain copy of the same bytes:  OMP_NUM_THREADS=1 python -m tests.bench.refit [MIB] [SAMPLES]

A trainer's weights, on one rank and sharded over two, go through ``refit.send`` to another process that receives them as an
engine's worker does (``arrival.py``): rows collected in a bucket, summed, broadcast over gloo, summed again as a whole and by
tensor, copied into place. Half of the bytes are experts, stacked in one tensor. The engine's own part (its layout, its caches)
is left out: it belongs to vLLM. The copy is one ``copy_`` of the same tensors here, the least that giving an engine its own
weights can cost. Filling the buckets and one checksum are also timed alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from molt_core.rollout import refit
from molt_core.rollout.arrival import Arrival, Sent
from molt_core.train.fsdp2 import sharded_weight
from molt_core.train.weights import Weight, collect

MIB = 2**20
EXPERTS = "layers.0.mlp.experts.gate_up_proj"
RANKS = (1, 2)


def shapes(mib: int) -> dict[str, tuple[int, ...]]:
    """float32: projections of 4 MiB, as a model of some billion parameters has, and 64 experts."""
    single = {f"layers.{n}.weight": (1024, 1024) for n in range(mib // 8)}
    return {**single, EXPERTS: (64, mib * MIB // 2 // 4 // 64 // 512, 512)}


def weights(mib: int, rank: int, ranks: int) -> list[Weight]:
    """Random ones, this rank's rows of each."""
    mesh, found = init_device_mesh("cpu", (ranks,)), []
    for name, (rows, *row) in shapes(mib).items():
        own = DTensor.from_local(torch.randn(rows // ranks, *row), mesh, [Shard(0)])
        found.append(sharded_weight(name, own, torch.float32))
    return found


def joined(rank: int, folder: Path) -> dist.ProcessGroup:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    return refit.join_group(store, rank, 2, torch.device("cpu"), 300.0)


def join_trainer(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/trainer"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)


def receive(folder: Path, buckets: multiprocessing.SimpleQueue, answers, mib: int) -> None:
    """The worker's side, until a bucket is None; a refit begins with the first name."""
    group = joined(1, folder)
    own = {name: torch.empty(shape) for name, shape in shapes(mib).items()}
    while (bucket := buckets.get()) is not None:
        slots = [refit.TensorSlot(**slot) for slot in bucket["slots"]]
        if slots[0].name == next(iter(own)):
            arrival = Arrival(torch.device("cpu"))
        buffer = arrival.buffer(slots, bucket["size"])
        refit.broadcast(group, buffer)
        correct = True
        for name, tensor in arrival.take(slots, buffer, bucket["checksum"]):
            correct &= arrival.sent[name] == Sent.of(own[name].copy_(tensor))
        answers.put(correct)


def take_part(rank: int, ranks: int, folder: Path, mib: int, times: int) -> None:
    join_trainer(rank, ranks, folder)
    own = weights(mib, rank, ranks)
    for _ in range(times):
        refit.take_part(own)
    dist.destroy_process_group()


def sent(mib: int, ranks: int, samples: int) -> tuple[float, float]:
    """Seconds of a refit from ``ranks`` ranks, this process being the first."""
    context = multiprocessing.get_context("spawn")
    buckets, answers = context.SimpleQueue(), context.SimpleQueue()
    with TemporaryDirectory() as name:
        folder = Path(name)
        worker = context.Process(target=receive, args=(folder, buckets, answers, mib))
        others = [
            context.Process(target=take_part, args=(rank, ranks, folder, mib, samples + 1))
            for rank in range(1, ranks)
        ]
        for process in (worker, *others):
            process.start()
        group = joined(0, folder)
        join_trainer(0, ranks, folder)
        own = weights(mib, 0, ranks)

        def announce(bucket: dict) -> Callable[[], None]:
            buckets.put(bucket)
            return lambda: answer(answers.get())

        taken = timed(lambda: refit.send(group, own, announce, frozenset(shapes(mib))), samples)
        buckets.put(None)
        for process in (worker, *others):
            process.join()
        dist.destroy_process_group()
    return taken


def parts(mib: int) -> dict[str, Callable[[], object]]:
    with TemporaryDirectory() as folder:
        join_trainer(0, 1, Path(folder))
        own = weights(mib, 0, 1)
        dist.destroy_process_group()
    planned = list(refit.buckets(own))
    bucket = torch.empty(max(b[-1][1].end for b in planned), dtype=torch.uint8)
    tensors = [next(iter(one.parts(0, one.shape[0]))).read() for one in own]
    places = [torch.empty_like(tensor) for tensor in tensors]

    def copied() -> None:
        for place, tensor in zip(places, tensors):
            place.copy_(tensor)

    def filled() -> None:
        for each in planned:
            collect((rows, slot.of_bucket(bucket)) for rows, slot in each)

    return {
        "plain copy": copied,
        "filling buckets": filled,
        "one checksum": lambda: [refit.checksum(bucket[: each[-1][1].end]) for each in planned],
    }


def timed(run: Callable[[], object], samples: int) -> tuple[float, float]:
    """Median wall and CPU seconds, after one run that does not count."""
    taken = []
    for _ in range(samples + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        taken.append((time.perf_counter() - wall, time.process_time() - cpu))
    walls, cpus = zip(*taken[1:])
    return statistics.median(walls), statistics.median(cpus)


def main(mib: int = 512, samples: int = 5) -> None:
    whole = {f"refit, {ranks} rank(s)": sent(mib, ranks, samples) for ranks in RANKS}
    alone = {name: timed(run, samples) for name, run in parts(mib).items()}
    copy = alone["plain copy"]
    table = Table("", "wall ms", "over a copy", "CPU ms here", "over a copy", title=f"{mib} MiB")
    for name, (wall, cpu) in {**whole, **alone}.items():
        ratios = f"{wall / copy[0]:.1f}x", f"{cpu / copy[1]:.1f}x"
        table.add_row(name, f"{1e3 * wall:.0f}", ratios[0], f"{1e3 * cpu:.0f}", ratios[1])
    Console(width=90).print(table)


def answer(correct: bool) -> None:
    if not correct:
        raise refit.RefitError("the receiving process holds other bytes than were sent")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
