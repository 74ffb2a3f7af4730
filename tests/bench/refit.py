"""What a refit costs over a plain copy of the same bytes:  OMP_NUM_THREADS=1 python -m tests.bench.refit [MIB] [SAMPLES]

A trainer's weights go through ``refit.send`` to another process that receives them as an engine's worker does
(``vllm_receiver``): buckets packed, summed, broadcast over gloo, summed again as a whole and by tensor, copied into place.
The engine's own part (its layout, its caches) is left out: it belongs to vLLM. The copy is one ``copy_`` of the same tensors
here, the least that giving an engine its own weights can cost. Packing and one checksum are also timed alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table

from molt_core.rollout import refit

MIB = 2**20
TENSOR_MIB = 4
"""Size of a tensor: a projection of a model of some billion parameters."""


def weights(mib: int) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    each = TENSOR_MIB * MIB // 4
    return [(f"layer.{n}.weight", torch.randn(each)) for n in range(mib // TENSOR_MIB)]


def joined(rank: int, folder: Path) -> dist.ProcessGroup:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    return refit.join_group(store, rank, 2, torch.device("cpu"), 300.0)


def receive(folder: Path, buckets: multiprocessing.SimpleQueue, answers, mib: int) -> None:
    """The worker's side, until a bucket is None."""
    group = joined(1, folder)
    own = {name: torch.empty_like(tensor) for name, tensor in weights(mib)}
    while (bucket := buckets.get()) is not None:
        slots = [refit.TensorSlot(**slot) for slot in bucket["slots"]]
        buffer = torch.empty(bucket["size"], dtype=torch.uint8)
        refit.broadcast(group, buffer)
        correct = refit.checksum(buffer) == bucket["checksum"]
        for name, tensor in refit.unpack(slots, buffer):
            correct &= refit.Sent.of(tensor) == refit.Sent.of(own[name].copy_(tensor))
        answers.put(correct)


def parts(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, Callable[[], object]]:
    own = [torch.empty_like(tensor) for _, tensor in tensors]
    packed = [buffer for _, buffer in refit.buckets(tensors)]

    def copied() -> None:
        for place, (_, tensor) in zip(own, tensors):
            place.copy_(tensor)

    return {
        "plain copy": copied,
        "packing": lambda: list(refit.buckets(tensors)),
        "one checksum": lambda: [refit.checksum(buffer) for buffer in packed],
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
    tensors = weights(mib)
    names = frozenset(name for name, _ in tensors)
    context = multiprocessing.get_context("spawn")
    buckets, answers = context.SimpleQueue(), context.SimpleQueue()
    with TemporaryDirectory() as folder:
        worker = context.Process(target=receive, args=(Path(folder), buckets, answers, mib))
        worker.start()
        group = joined(0, Path(folder))

        def announce(bucket: dict) -> Callable[[], None]:
            buckets.put(bucket)
            return lambda: answer(answers.get())

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            yield from tensors

        whole = timed(lambda: refit.send(group, stream(), announce, names), samples)
        buckets.put(None)
        worker.join()
    alone = {name: timed(run, samples) for name, run in parts(tensors).items()}
    copy = alone["plain copy"]
    table = Table("", "wall ms", "over a copy", "CPU ms here", "over a copy", title=f"{mib} MiB")
    for name, (wall, cpu) in {"refit, both ends": whole, **alone}.items():
        ratios = f"{wall / copy[0]:.1f}x", f"{cpu / copy[1]:.1f}x"
        table.add_row(name, f"{1e3 * wall:.0f}", ratios[0], f"{1e3 * cpu:.0f}", ratios[1])
    Console(width=90).print(table)


def answer(correct: bool) -> None:
    if not correct:
        raise refit.RefitError("the receiving process holds other bytes than were sent")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
