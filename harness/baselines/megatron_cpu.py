"""What Megatron-Core needs to believe before it runs on a machine without a GPU. Nothing here runs where there is one.

Megatron-Core asks CUDA for things that its arithmetic does not need: the current device, scalars on it, streams to copy split
sizes on, a random state for a dropout that is off, type names in assertions. ``install`` answers those questions inside
Megatron's own modules, which see a ``torch`` of their own; ``torch`` itself stays as it is for the rest of the process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe import moe_utils, token_dispatcher


class _Stream:
    """A stream or an event of a device that does everything in order."""

    def wait_stream(self, stream: _Stream) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...


class _Delegate(ModuleType):
    """Answers from ``overrides``, else as ``module`` does; every answer is kept, so that it costs one look-up."""

    def __init__(self, module: ModuleType, **overrides) -> None:
        super().__init__(module.__name__)
        self._module = module
        self.__dict__.update(overrides)

    def __getattr__(self, name: str):
        value = getattr(self._module, name)
        setattr(self, name, value)
        return value


def _without_cuda(factory):
    def make(*arguments, **options):
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return factory(*arguments, **options)

    return make


def _split_sizes_as_lists(tensor, as_numpy: bool = False, record_stream: bool = False):
    """Megatron's ``maybe_move_tensor_to_cpu``, which converts only what it moves, for what is there already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def install() -> None:
    """Idempotent. Call after Megatron's modules are imported and before anything is built.

    Raises RuntimeError where a GPU is visible.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "Megatron-Core's CPU mode is for machines without a GPU; set trainer.device: cuda, or hide the GPUs "
            "(CUDA_VISIBLE_DEVICES=)"
        )
    stream = _Stream()
    cuda = _Delegate(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        current_stream=lambda: stream,
        Stream=lambda: stream,
        stream=contextlib.nullcontext,
    )
    factories = {name: _without_cuda(getattr(torch, name)) for name in ("tensor", "zeros", "ones")}
    megatron_torch = _Delegate(torch, cuda=cuda, **factories)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = megatron_torch
    CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    moe_utils.te_general_gemm = None  # an unbound name where Transformer Engine is missing
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes_as_lists


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Inside, ``Tensor.type()`` of a CPU tensor gives the CUDA name that Megatron's optimiser asserts."""
    original = torch.Tensor.type

    def named(self, *arguments, **options):
        answer = original(self, *arguments, **options)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    torch.Tensor.type = named
    try:
        yield
    finally:
        torch.Tensor.type = original
