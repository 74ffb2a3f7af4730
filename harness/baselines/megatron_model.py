"""Qwen3-VL-MoE and Qwen3-MoE as Megatron-Core builds them: a GPTModel with MoE layers, behind the vision tower or alone.

Megatron has neither interleaved multimodal RoPE nor deepstack; both are added as modules that its layer specification takes,
so that GPTModel itself is unchanged:

- ``InterleavedMRoPE`` stands where GPTModel keeps its rotary embedding, and gives angles ``[T, 1, 1, head_dim]``;
- ``DeepstackLayer`` is a transformer layer that adds the vision tower's intermediate features after itself;
- ``ReplayRouter`` is Megatron's router that tells what it chose and takes the engine's choices;

- ``RowAttention`` is Megatron's plain attention, row by row of a packed micro-batch.

Hidden states are ``[T, 1, hidden]``, and split over T between tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import MegatronModule, TransformerConfig, TransformerLayer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.baselines.megatron_layout import Layout
from molt_core.train.collate import Blocks, MicroBatch
from molt_core.train.logprobs import ActionDistribution, action_logprobs
from molt_core.train.policy import blank_image, check_text_alone
from molt_core.train.routing import Choice, choose, replay
from molt_core.types import NOT_SAMPLED


def check_supported(config) -> None:
    """Raise ValueError for a Hugging Face ``config`` with something that this translation does not cover."""
    text = config.get_text_config()
    rope = text.rope_parameters
    expected = {
        "hidden_act": (text.hidden_act, "silu"),
        "attention_bias": (text.attention_bias, False),
        "attention_dropout": (text.attention_dropout, 0.0),
        "decoder_sparse_step": (text.decoder_sparse_step, 1),
        "mlp_only_layers": (list(text.mlp_only_layers or []), []),
        "rope_parameters.rope_type": (rope.get("rope_type", "default"), "default"),
        "tie_word_embeddings": (bool(config.tie_word_embeddings), False),
    }
    for key, (found, supported) in expected.items():
        if found != supported:
            raise ValueError(
                f"the Megatron-Core backend knows {key}: {supported!r} only, the checkpoint has {found!r}; "
                "use trainer.backend: fsdp2"
            )


def transformer_config(text, layout: Layout, dtype: torch.dtype, device: str) -> TransformerConfig:
    """Megatron's description of the decoder ``text`` (a Hugging Face text config)."""
    return TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=text.head_dim,
        ffn_hidden_size=text.moe_intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        num_moe_experts=text.num_experts,
        moe_ffn_hidden_size=text.moe_intermediate_size,
        moe_router_topk=text.num_experts_per_tok,
        # Top-k of the logits, then softmax over those k: the same numbers as softmax, top-k, renormalise.
        moe_router_pre_softmax=False,
        moe_router_score_function="softmax",
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="alltoall",
        # Of text alone the three axes are one.
        mrope_section=text.rope_parameters.get("mrope_section", [text.head_dim // 2, 0, 0]),
        tensor_model_parallel_size=layout.tensor_parallel,
        expert_model_parallel_size=layout.expert_parallel,
        expert_tensor_parallel_size=layout.expert_tensor_parallel,
        sequence_parallel=layout.tensor_parallel > 1,
        # Gradients are summed over the data ranks, not averaged: the loss has its global denominator already.
        calculate_per_token_loss=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Sets the attributes by which Megatron counts a sharded gradient once in the norm; the values are overwritten.
        perform_initialization=True,
        use_cpu_initialization=device == "cpu",
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )


class RMSNorm(nn.RMSNorm):
    """Megatron's plain-torch norm refuses sequence parallelism; this one tells Megatron to sum its gradient over the ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class InterleavedMRoPE(nn.Module):
    """Angles of Qwen3-VL's rotary embedding: frequency 3i is turned by time, 3i + 1 by height, 3i + 2 by width.

    Height and width end at three times their section; what is left belongs to time.
    """

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        self.register_buffer(
            "inverse_frequencies",
            1.0 / base ** (torch.arange(0, head_dim, 2).float() / head_dim),
            persistent=False,
        )

    def forward(
        self, position_ids: torch.Tensor, section: list[int], cp_group=None
    ) -> torch.Tensor:
        """position_ids ``[3, B, T]`` to angles ``[T, B, 1, head_dim]``."""
        angles = position_ids.float()[..., None] * self.inverse_frequencies
        merged = angles[0].clone()
        for axis in (1, 2):
            own = slice(axis, 3 * section[axis], 3)
            merged[..., own] = angles[axis][..., own]
        return torch.cat([merged, merged], -1).transpose(0, 1)[:, :, None].contiguous()


class DeepstackLayer(TransformerLayer):
    """A transformer layer that adds ``visual_delta`` (``[T, 1, hidden]``, zero at text) to its output.

    Megatron's own activation recomputation asks for CUDA's random state, although there is no dropout to repeat; torch's does
    not, and serves on every device.
    """

    visual_delta: torch.Tensor | None = None
    checkpointed = False

    def forward(self, *args, **kwargs):
        forward = super().forward
        if self.checkpointed:
            forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        hidden, context = forward(*args, **kwargs)
        return hidden if self.visual_delta is None else hidden + self.visual_delta, context


class RowAttention(DotProductAttention):
    """Megatron's plain attention over the rows of a micro-batch, which lie end to end.

    blocks: see ``collate.Blocks``; futures: for each, ``[1, 1, length, length]``, True at keys after the query.

    Megatron's own packed attention is Transformer Engine's, which runs on GPUs only.
    """

    blocks: Blocks
    futures: list[torch.Tensor]

    def forward(self, query, key, value, attention_mask, **_) -> torch.Tensor:
        """query ``[T, 1, heads, d]``, key and value ``[T, 1, kv_heads, d]``; returns ``[T, 1, heads * d]``."""
        outputs, start = [], 0
        for (rows, length), future in zip(self.blocks, self.futures, strict=True):
            stop = start + rows * length
            parts = [
                tensor[start:stop, 0].unflatten(0, (rows, length)).transpose(0, 1)
                for tensor in (query, key, value)
            ]
            if (
                key.shape[2] == query.shape[2]
            ):  # else Megatron repeats, and so copies, the keys and values
                parts = [part.contiguous() for part in parts]
            output = super().forward(*parts, future)
            outputs.append(output.transpose(0, 1).flatten(0, 1))
            start = stop
        return torch.cat(outputs)[:, None]


class ReplayRouter(TopKRouter):
    """Megatron's router that tells what it chose, and chooses what ``replay`` (``[T, k]``, this rank's tokens) says.

    Megatron's own replay has no place for tokens without a record.
    """

    replay: torch.Tensor | None = None
    choice: Choice

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None):
        """logits ``[T, 1, experts]`` float32; the weight of each expert and whether it was chosen, ``[T, experts]``."""
        flat = logits.flatten(0, 1)
        self.choice = choose(flat, self.topk, self.replay)
        if self.replay is None:
            return super().routing(logits, padding_mask)
        chosen = self.choice.chosen
        weights = flat.gather(1, chosen).softmax(-1)
        return (
            torch.zeros_like(flat).scatter(1, chosen, weights),
            torch.zeros_like(flat, dtype=torch.bool).scatter(1, chosen, True),
        )


def _decoder_specification(config: TransformerConfig) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=True, normalization="RMSNorm"
    )
    layer.module = DeepstackLayer
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = RowAttention
    attention.q_layernorm = attention.k_layernorm = RMSNorm
    parts.mlp.submodules.router = ReplayRouter
    layers: list[ModuleSpec] = [layer] * config.num_layers
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


class ActionHead(nn.Module):
    """The output layer and the softmax over a vocabulary that is cut over the tensor-parallel ranks.

    A module, so that Megatron's DistributedDataParallel has gathered the weight before it is read.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self, hidden: torch.Tensor, ids: torch.Tensor, distribution: ActionDistribution
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden ``[N, hidden]`` whole on every rank; see ``logprobs.action_logprobs``."""
        cut = parallel_state.get_tensor_model_parallel_world_size() > 1
        group = parallel_state.get_tensor_model_parallel_group() if cut else None
        return action_logprobs(hidden, self.weight, ids, distribution, group)


class MegatronPolicy(MegatronModule):
    """``forward(micro_batch, distribution)``: log-probabilities and entropies ``[N]`` of the action tokens."""

    def __init__(
        self, config: TransformerConfig, text, visual: nn.Module | None, routing_replay: bool
    ) -> None:
        super().__init__(config)
        self.visual, self.routing_replay = visual, routing_replay
        self.language_model = GPTModel(
            config,
            _decoder_specification(config),
            vocab_size=text.vocab_size,
            max_sequence_length=text.max_position_embeddings,
            share_embeddings_and_output_weights=False,
            position_embedding_type="mrope",
            rotary_base=text.rope_parameters["rope_theta"],
            scatter_embedding_sequence_parallel=False,
        )
        self.language_model.rotary_pos_emb = InterleavedMRoPE(
            text.head_dim, text.rope_parameters["rope_theta"]
        )
        # GPTModel then returns hidden states; the output layer's weight serves below, at the few positions that need it.
        self.language_model.post_process = False
        self.head = ActionHead(self.language_model.output_layer.weight)
        del self.language_model.output_layer

    @property
    def routers(self) -> list[ReplayRouter]:
        return [layer.mlp.router for layer in self.language_model.decoder.layers]

    def forward(
        self, batch: MicroBatch, distribution: ActionDistribution
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = pad_tokens(batch, self.config.tensor_model_parallel_size)
        decoder_input = self._embed(batch)
        futures = [
            torch.ones(length, length, dtype=torch.bool, device=decoder_input.device).triu_(1)[
                None, None
            ]
            for _, length in batch.blocks
        ]
        for layer in self.language_model.decoder.layers:
            attention = layer.self_attention.core_attention
            attention.blocks, attention.futures = batch.blocks, futures
        if self.routing_replay:
            replay(self.routers, self._own_tokens(batch))
        hidden = self.language_model(
            input_ids=None,
            position_ids=batch.position_ids[:, None],
            attention_mask=None,
            decoder_input=decoder_input,
        )
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        hidden = hidden[batch.action_positions - 1, 0]
        return self.head(hidden, batch.action_ids, distribution)

    def _own_tokens(self, batch: MicroBatch) -> MicroBatch:
        """``batch`` with the record of those tokens that this rank's routers see."""
        if batch.routed_experts is None or not self.config.sequence_parallel:
            return batch
        parts = batch.routed_experts.chunk(self.config.tensor_model_parallel_size)
        rank = parallel_state.get_tensor_model_parallel_rank()
        return replace(batch, routed_experts=parts[rank])

    def _embed(self, batch: MicroBatch) -> torch.Tensor:
        """Embeddings, with image features in place; sets every layer's deepstack features."""
        embedded, deltas = self.language_model.embedding(batch.token_ids[None], None), []
        if self.visual is None:
            check_text_alone(batch)
        else:
            embedded, deltas = self._see(embedded, batch)
        if self.config.sequence_parallel:
            embedded = scatter_to_sequence_parallel_region(embedded)
            deltas = [scatter_to_sequence_parallel_region(delta) for delta in deltas]
        layers = self.language_model.decoder.layers
        for number, layer in enumerate(layers):
            layer.visual_delta = deltas[number] if number < len(deltas) else None
        return embedded

    def _see(
        self, embedded: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """``embedded`` with image features in place, and the deepstack features of the first layers."""
        has_images = batch.patches is not None
        patches, grid = (batch.patches, batch.grid_thw) if has_images else blank_image(self.visual)
        features = self.visual(patches.to(self.visual.dtype), grid_thw=grid, return_dict=True)
        if not has_images:
            # The tower takes part with weight zero, so that every rank's gradients are complete whatever rows it drew.
            outputs = (features.pooler_output, *features.deepstack_features)
            return embedded + 0.0 * sum(output.sum() for output in outputs), []
        place = (batch.image_positions, torch.zeros_like(batch.image_positions))
        index = batch.feature_index
        deltas = [
            torch.zeros_like(embedded).index_put(place, feature[index].to(embedded.dtype))
            for feature in features.deepstack_features
        ]
        pooled = features.pooler_output[index].to(embedded.dtype)
        return embedded.index_put(place, pooled), deltas


def pad_tokens(batch: MicroBatch, multiple: int) -> MicroBatch:
    """The batch with one more row that means nothing, where its tokens do not divide by ``multiple``."""
    extra = -len(batch.token_ids) % multiple
    if not extra:
        return batch
    return replace(
        batch,
        token_ids=F.pad(batch.token_ids, (0, extra)),
        position_ids=F.pad(batch.position_ids, (0, extra)),
        blocks=(*batch.blocks, (1, extra)),
        routed_experts=None
        if batch.routed_experts is None
        else F.pad(batch.routed_experts, (0, 0, 0, 0, 0, extra), value=NOT_SAMPLED),
    )
