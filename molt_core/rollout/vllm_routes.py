"""vLLM's recorder of expert choices, on the CPU: what ``enable_return_routed_experts`` is on a GPU.

vLLM 0.32 records the experts of each token in the worker and returns them with a request, through prefix caching, preemption
and refits. Only its newer model runner drives that recorder, and that one needs Triton, so on the CPU the flag is refused.
Recorder, store and delivery do not: ``worker_cls`` and ``scheduler_cls`` below drive them with the model runner that the CPU
has, once before a forward pass and once after sampling, as the newer runner does. Blocks of the KV cache are known by their
hashes, so prefix caching must be on.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


class RecordingModelRunner(CPUModelRunner):
    """Steps follow each other here: a step's record is returned with its own tokens."""

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **options: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, **options)
        if not is_profiling:
            self._recorder = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        self._recorder.begin_step(scheduler_output.aux_output_connector_metadata)
        return super().execute_model(scheduler_output, intermediate_tensors)

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self.execute_model_state is None:  # nothing was computed
            return super().sample_tokens(grammar_output)
        requests = self.input_batch.num_reqs
        step = self._recorder.prepare_output(
            SimpleNamespace(
                req_ids=self.input_batch.req_ids,
                num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[:requests].copy(),
                query_start_loc_np=self.query_start_loc.np[: requests + 1].copy(),
            )
        )
        samples = ~self.discard_request_mask.np[:requests]
        output = super().sample_tokens(grammar_output)
        step.enqueue_cpu_copy(samples.astype(np.int32), np.zeros(requests, np.int32))
        output.aux_output_connector_output = step.process_output()
        return output


class RecordingWorker(CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        self.model_runner = RecordingModelRunner(self.vllm_config, self.device)


class RecordingScheduler(Scheduler):
    """Tells the worker what to return with each request."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.aux_output_connector = AuxOutputSchedulerConnector()
