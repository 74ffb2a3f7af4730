"""The engine: token-exact generation with vLLM. Token ids in; token ids, their log-probabilities and versions out.

Nothing here knows of agents, rewards or training. A request carries every sampling field explicitly (an omitted one would be
filled from the model's own generation config, and the trainer would score another distribution than the one sampled).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import molt_core
from molt_core.config import EngineConfig, ModelConfig
from molt_core.models.load import expert_layers
from molt_core.rollout.refit import RefitError
from molt_core.types import ContractError, ImageInput, NotFinite

EXCLUDED_BIAS = -100.0
"""Added to the logits of excluded ids: e^-100 of probability is left, far below float32's resolution of the rest."""

DEAD_AFTER_S = 1.0
"""How often it is looked whether vLLM's process, which owes an answer, still lives."""

RENDERED_TOKENS = 2**16
"""Prompts are kept with their processed images, a few KiB a token, up to so many tokens at full length, and 32 at least: the
samples of a group ask for theirs one after another, and probes and evaluations come back to the held-out ones."""


class EngineError(RuntimeError):
    """The engine failed; unlike an agent's own failure this ends the run."""


@dataclass(frozen=True)
class Sampled:
    """What the policy generated for one request. Arrays run over its n new tokens.

    token_ids int32, logprobs float32 (of the processed distribution), versions int32 (vLLM's own spans).
    ``prompt_token_ids`` is the prompt as the engine expanded it, to be compared with ours. routed_experts ``[T, layers, k]``
    int16, layers with experts only, or None where routes are not recorded: of all positions that were computed, from the
    prompt's first to the last but one (the last sampled token was never an input).
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    prompt_token_ids: Sequence[int]
    routed_experts: np.ndarray | None = None


@dataclass
class BusyClock:
    """The stretches of time in which at least one request was being decoded (``time.time`` seconds).

    ``take`` may be called from another thread.
    """

    running: int = 0
    since: float = 0.0
    stretches: list[tuple[float, float]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def request(self):
        with self.lock:
            if self.running == 0:
                self.since = time.time()
            self.running += 1
        try:
            yield
        finally:
            with self.lock:
                self.running -= 1
                if self.running == 0:
                    self.stretches.append((self.since, time.time()))

    def take(self) -> list[tuple[float, float]]:
        """The stretches up to now; a running one is cut here and goes on in the next call's answer."""
        with self.lock:
            now = time.time()
            out, self.stretches = self.stretches, []
            if self.running:
                out.append((self.since, now))
                self.since = now
        return out


def prepare_environment(config: EngineConfig) -> None:
    """Settings that vLLM reads at import. Call before the first ``import vllm`` of the process.

    On the CPU: no worker process beside the engine core (8 s of start), no compiled log-prob ranking (2 s at the first
    request), threads as configured instead of pinned to all cores.
    """
    site = str(Path(molt_core.__file__).parent / "_site")
    if site not in os.environ.get("PYTHONPATH", ""):
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [site, os.environ.get("PYTHONPATH")])
        )
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if config.device == "cpu":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        os.environ["OMP_NUM_THREADS"] = str(config.threads)


def _device_arguments(config: EngineConfig, model: ModelConfig) -> dict[str, Any]:
    """vLLM's arguments that differ between the devices."""
    if config.device == "cuda":
        return {"enable_return_routed_experts": True} if model.routing_replay else {}
    # A prompt that is prefilled in pieces rewinds its request's generator, which vLLM 0.32 cannot do on the CPU: it kills
    # the engine. Hence whole prompts only.
    arguments = {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, model.max_length),
    }
    if model.routing_replay:
        recording = "molt_core.rollout.vllm_routes.Recording"
        arguments |= {"worker_cls": f"{recording}Worker", "scheduler_cls": f"{recording}Scheduler"}
    return arguments


class Engine:
    """One vLLM ``AsyncLLM``. Create inside a running event loop."""

    def __init__(
        self,
        checkpoint: Path,
        model: ModelConfig,
        config: EngineConfig,
        excluded_ids: Sequence[int],
        eos_id: int,
    ) -> None:
        prepare_environment(config)
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        from molt_core.rollout import vllm_plugin

        vllm_plugin.register()
        self.clock = BusyClock()
        self.version = 0
        self._on_cpu = config.device == "cpu"
        self.tokens: Counter[str] = Counter()
        self._eos_id = eos_id
        self._excluded = {int(token): EXCLUDED_BIAS for token in excluded_ids}
        self._requests = 0
        self._rendered = lru_cache(max(32, RENDERED_TOKENS // model.max_length))(self._render)
        self._expert_layers = expert_layers(checkpoint) if model.routing_replay else ()
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(checkpoint),
                dtype=model.dtype,
                max_model_len=model.max_length,
                max_num_seqs=config.max_sequences,
                num_gpu_blocks_override=config.kv_cache_blocks,
                tensor_parallel_size=config.tensor_parallel,
                # Said, because in a placement group of Ray's vLLM would put its workers on places that are the trainer's.
                distributed_executor_backend="mp" if config.tensor_parallel > 1 else "uni",
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                enable_prefix_caching=config.prefix_caching,
                # vLLM's own cache of processed images is emptied by a refit while requests read it, which fails them; the
                # samples of a prompt share one rendered prompt here instead.
                mm_processor_cache_gb=0,
                weight_transfer_config=WeightTransferConfig(backend=vllm_plugin.BACKEND),
                seed=0,
                disable_log_stats=True,
                **_device_arguments(config, model),
            )
        )

    async def start(self) -> None:
        """Name the weights that were loaded: version 0."""
        await self._answered(self._llm.update_weight_version(str(self.version)))

    async def generate(
        self,
        prompt_ids: Sequence[int],
        images: Sequence[ImageInput],
        *,
        purpose: str = "train",
        **sampling: Any,
    ) -> Sampled:
        """Sample one continuation. ``prompt_ids`` has one placeholder an image (the engine expands it).

        sampling: temperature, max_new_tokens, seed, and stop_at_eos, which is true where not given. The new tokens are counted
        in ``tokens[purpose]`` as vLLM returned them, before anything else looks at them.

        Raises ContractError where the engine leaves out a log-probability or a version, NotFinite where one is no number.
        """
        return await self._answer(await self._submit(prompt_ids, images, **sampling), purpose)

    async def generate_together(
        self, calls: Sequence[tuple[tuple, Mapping[str, Any]]]
    ) -> list[Sampled]:
        """``generate`` for each of ``calls`` (its arguments), computed in this order from empty caches, in one composition.

        The engine must have no other requests. It stands still until it has all of them, so that no forward pass depends on
        when they arrived, nor on what was cached before.
        """
        await self._answered(self._llm.pause_generation(mode="keep", clear_cache=True))
        submitted = []
        for positional, named in calls:
            named = dict(named)
            purpose = named.pop("purpose")
            submitted.append((await self._submit(*positional, **named), purpose))
        await self._answered(self._llm.resume_generation())
        return await asyncio.gather(*(self._answer(queue, purpose) for queue, purpose in submitted))

    async def _submit(
        self,
        prompt_ids: Sequence[int],
        images: Sequence[ImageInput],
        *,
        temperature: float,
        max_new_tokens: int,
        seed: int,
        stop_at_eos: bool = True,
    ) -> Any:
        """Put a request into vLLM's queue; returns where its answer will come from."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            n=1,
            temperature=temperature,
            top_p=1.0,
            top_k=-1,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            seed=seed,
            max_tokens=max_new_tokens,
            min_tokens=0,
            stop_token_ids=[self._eos_id] if stop_at_eos else [],
            ignore_eos=True,  # only our own stop ids end a request, never the model's generation config
            logit_bias=self._excluded or None,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._requests += 1
        try:
            pixels = tuple((image.pixels.tobytes(), image.pixels.shape) for image in images)
            prompt = self._rendered(tuple(prompt_ids), pixels)
            return await self._llm.add_request(f"r{self._requests}", prompt, params)
        except Exception as error:
            raise EngineError(f"generation failed: {type(error).__name__}: {error}") from error

    async def _answer(self, queue: Any, purpose: str) -> Sampled:
        try:
            with self.clock.request():
                final = await queue.get()
        except Exception as error:
            raise EngineError(f"generation failed: {type(error).__name__}: {error}") from error
        self.tokens[purpose] += len(final.outputs[0].token_ids)
        return _sampled(final, self._expert_layers)

    def _render(self, prompt_ids: tuple[int, ...], pixels: tuple[tuple, ...]) -> Any:
        from PIL import Image
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
        if pixels:
            images = [np.frombuffer(raw, np.uint8).reshape(shape) for raw, shape in pixels]
            prompt["multi_modal_data"] = {"image": [Image.fromarray(image) for image in images]}
        renderer = self._llm.renderer
        parsed = parse_model_prompt(self._llm.model_config, prompt)
        (rendered,) = renderer.render_cmpl([parsed], renderer.default_cmpl_tok_params)
        return rendered

    async def pause(self) -> None:
        """Freeze requests where they are and drop every cache that depends on the weights."""
        await self._answered(self._llm.pause_generation(mode="keep", clear_cache=True))
        await self._answered(self._llm.start_weight_update())

    async def receive(self, bucket: Mapping[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=dict(bucket))
        with _named_refit_error():
            await self._answered(self._llm.update_weights(request))

    async def resume(self, version: int) -> None:
        """Commit the weights as ``version`` and go on; caches are recomputed under the new weights.

        Raises RefitError where the engine holds other weights than were sent.
        """
        with _named_refit_error():
            await self._answered(self._llm.finish_weight_update(weight_version=str(version)))
        self.version = version
        await self._answered(self._llm.resume_generation())

    async def join(self, join_info: Mapping[str, Any]) -> None:
        """Join the trainer's refit group (collective with ``refit.join_group`` at the trainer)."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=dict(join_info))
        await self._answered(self._llm.init_weight_transfer_engine(request))

    async def _answered(self, call: Coroutine[Any, Any, Any]) -> None:
        """Wait for vLLM's own process to do what ``call`` asks it for.

        Raises EngineError where that process is dead: vLLM fails the requests then, and leaves any other call waiting.
        """
        asked = asyncio.ensure_future(call)
        while not (asked.done() or self._llm.errored):
            await asyncio.wait([asked], timeout=DEAD_AFTER_S)
        if self._llm.errored:
            asked.cancel()
            raise EngineError("the engine's own process is dead")
        await asked

    def shutdown(self) -> None:
        """End vLLM's process. One on the CPU is killed at once: it has no device to release, and tidies up for seconds."""
        if self._on_cpu:
            logging.getLogger("vllm.v1.utils").setLevel(logging.ERROR)  # it warns of just that
        self._llm.shutdown(timeout=0.0 if self._on_cpu else None)


@contextmanager
def _named_refit_error():
    """What vLLM raises for a failed refit says no more than its text."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        raise RefitError(f"the engine could not take the weights: {error}") from error


def _sampled(output, expert_layers: Sequence[int] = ()) -> Sampled:
    """vLLM's answer as ours. expert_layers: those of which routes are to be taken; none where they are not recorded."""
    completion = output.outputs[0]
    ids = np.asarray(completion.token_ids, np.int32)
    if completion.logprobs is None or len(completion.logprobs) != len(ids):
        raise ContractError(f"engine returned {len(ids)} tokens without a log-probability each")
    logprobs = np.array(
        [entry[int(token)].logprob for token, entry in zip(ids, completion.logprobs)], np.float32
    )
    versions = np.full(len(ids), -1, np.int32)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise ContractError("engine returned tokens without a policy version")
    for value, version in zip(logprobs, versions):
        if not np.isfinite(value):
            raise NotFinite(
                f"the engine sampled a token of log-probability {value}, version {version}",
                int(version),
            )
    prompt, routes = output.prompt_token_ids, None
    if expert_layers:
        computed, routes = len(prompt) + len(ids) - 1, completion.routed_experts
        if routes is None or len(routes) != computed:
            raise ContractError(
                f"engine returned routes of {0 if routes is None else len(routes)} positions, it computed {computed}"
            )
        routes = routes[:, expert_layers].astype(np.int16)
    return Sampled(ids, logprobs, versions, completion.finish_reason, prompt, routes)
