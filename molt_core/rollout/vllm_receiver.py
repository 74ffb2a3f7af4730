"""The engine's end of a refit in vLLM: a weight-transfer engine that receives ``refit.py``'s buckets.

Runs in vLLM's worker process. Loading goes through vLLM's layerwise reload, because on the CPU the original tensors are gone
after load (packed for oneDNN) and on a GPU several layouts are post-processed as well.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from molt_core.models.layout import ARCHITECTURES
from molt_core.rollout.arrival import Arrival, check_kept
from molt_core.rollout.refit import RefitError, TensorSlot, broadcast, join_group

# It warns at every refit of modules that have no weights to load (rotary embeddings).
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """Where the trainer's store listens, and this engine's first rank among ``size`` members."""

    host: str
    port: int
    first_rank: int
    size: int
    timeout_s: float


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket: its tensors (``refit.TensorSlot`` fields), its size in bytes, its checksum."""

    slots: list[dict]
    size: int
    checksum: int


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Let an output layer that is the embedding compute with what the embedding is now.

    vLLM 0.32 packs it for the CPU when the model is loaded, and again only where weights of its own arrive, which never do.
    """
    modules = list(model.modules())
    embeddings = {m.weight.data_ptr() for m in modules if type(m) is VocabParallelEmbedding}
    for module in modules:
        if isinstance(module, ParallelLMHead) and module.weight.data_ptr() in embeddings:
            module.quant_method.process_weights_after_loading(module)


class BucketReceiver(WeightTransferEngine[JoinInfo, BucketInfo]):
    init_info_cls = JoinInfo
    update_info_cls = BucketInfo

    group: dist.ProcessGroup | None = None

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        store = dist.TCPStore(init_info.host, init_info.port, is_master=False)
        rank = init_info.first_rank + self.parallel_config.rank
        self.group = join_group(store, rank, init_info.size, self.device, init_info.timeout_s)

    def start_weight_update(self) -> None:
        self._arrival = Arrival(self.device)
        if self.device.type == "cpu":
            # vLLM 0.32 re-packs the experts for the CPU only where no kernel exists yet; without this the unpacked weights
            # land where packed ones are read, and every log-probability is silently wrong from the first refit on.
            for module in self.model.modules():
                method = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketInfo) -> None:
        if self.group is None:
            raise RefitError("a bucket arrived before the engine joined the trainer's group")
        slots = [TensorSlot(**slot) for slot in update_info.slots]
        buffer = self._arrival.buffer(slots, update_info.size)
        broadcast(self.group, buffer)
        tensors = self._arrival.take(slots, buffer, update_info.checksum)
        architecture = ARCHITECTURES[self.model_config.hf_config.model_type]
        self.model.load_weights(architecture.published(tensors))

    def finish_weight_update(self) -> None:
        self._arrival.finish()
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_heads(self.model)
        kept = dict(self.model.named_parameters())
        check_kept(self._arrival.sent, kept, self.model.hf_to_vllm_mapper.map_name)

    def shutdown(self) -> None:
        self.group = None
