"""What each rank of the test of ``train/weights.py`` does: a refit from shards to an engine's end in a thread of rank 0."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from molt_core.rollout import refit
from molt_core.rollout.arrival import Arrival
from molt_core.train.fsdp2 import sharded_weight
from molt_core.train.weights import Weight, whole_weights

LIMIT = 1024
SHAPES = {
    "embed": (301, 8),
    "norm": (7,),
    "gate_up": (8, 6, 10),
    "one_row": (1, 40),
    "down": (5, 12, 8),
    "large_rows": (4, 300),  # over three ranks: two, two and none; a row is larger than a bucket
}
DTYPES = {
    name: torch.bfloat16 if name in ("embed", "gate_up") else torch.float32 for name in SHAPES
}


def values() -> dict[str, torch.Tensor]:
    """The weights, float32, as if they were on one rank."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Largest(TorchDispatchMode):
    """Bytes of the largest piece of memory that this thread allocates for a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        known = {_memory(t) for t in tree_leaves((arguments, options)) if torch.is_tensor(t)}
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor) and _memory(tensor) not in known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Engine(threading.Thread):
    """Receives as ``vllm_receiver`` does, and keeps what arrives."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.told, self.answers = store, queue.Queue(), queue.Queue()
        self.found: dict[str, torch.Tensor] = {}

    def run(self) -> None:
        group = refit.join_group(self.store, 1, 2, torch.device("cpu"), 60.0)
        arrival = Arrival(torch.device("cpu"))
        while (bucket := self.told.get()) is not None:
            slots = [refit.TensorSlot(**slot) for slot in bucket["slots"]]
            buffer = arrival.buffer(slots, bucket["size"])
            refit.broadcast(group, buffer)
            self.found.update(arrival.take(slots, buffer, bucket["checksum"]))
            self.answers.put(None)
        arrival.finish()

    def announce(self, bucket: dict):
        self.told.put(bucket)
        return lambda: self.answers.get(timeout=60)


def sent_to_an_engine(weights: list[Weight]) -> tuple[dict[str, torch.Tensor], int]:
    """Rank 0: what arrives, and the largest piece of memory taken at this end."""
    store = dist.HashStore()
    engine = Engine(store)
    engine.start()
    group = refit.join_group(store, 0, 2, torch.device("cpu"), 60.0)
    with Largest() as largest:
        refit.send(group, weights, engine.announce, frozenset(SHAPES), LIMIT)
    engine.told.put(None)
    engine.join()
    return engine.found, largest.bytes


def run(rank: int, world_size: int, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    refit.CHECKSUM_ROW = 16  # its factors take 64 KiB else, which says nothing about the weights
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    module = nn.ParameterDict({n: nn.Parameter(v) for n, v in values().items()})
    fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
    weights = [sharded_weight(n, p, DTYPES[n]) for n, p in module.named_parameters()]
    if rank == 0:
        arrived, largest = sent_to_an_engine(weights)
    else:
        with Largest() as seen:
            refit.take_part(weights, LIMIT)
        arrived, largest = None, seen.bytes
    torch.save((arrived, dict(whole_weights(weights, LIMIT)), largest), out / f"{rank}.pt")
    dist.destroy_process_group()
