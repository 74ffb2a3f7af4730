"""Whole policies from code and a seed: config, weights, tokenizer, image processor and chat template.

    tiny-qwen3-vl-moe   Qwen3-VL-MoE: images and text, experts stacked in its files
    tiny-qwen3-moe      Qwen3-MoE: the same decoder for text alone, one tensor an expert in its files

Small enough to train in minutes on one CPU thread, and the real architectures in every part that goes wrong in practice:
routed experts, grouped-query attention with q/k norms, interleaved multimodal RoPE, a vision tower with deepstack, placeholder
tokens, a vocabulary padded beyond the tokenizer. Nothing is downloaded; the same seed gives the same tensors.

    python -m molt_core.models.tiny NAME FOLDER [SEED]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from molt_core.models.layout import check_layout_is_decidable
from molt_core.models.load import write_weights

HIDDEN, EXPERT, HEAD_DIM, PATCH = 64, 96, 32, 8
VOCABULARY = 384
"""Rows of the embedding: more than the tokenizer has, as in the published models; the surplus must never be sampled."""

ROUTER_STD = 0.5
"""Routers start decided, as in a trained model: near-uniform scores would tie within rounding at every twentieth token, and
a tie leaves nothing to compare between trainer and engine."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'text' -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

_WORDS = """
    what color is the square? name colors of all squares from left to right larger smaller top bottom
    red green blue grey yellow purple orange cyan , . system user assistant
""".split()


def build_tiny_qwen3_vl_moe(folder: Path, seed: int = 0) -> Path:
    """Write the policy's complete Hugging Face folder, weights in the published expert layout; returns ``folder``."""
    tokenizer = _tokenizer()
    model = Qwen3VLMoeForConditionalGeneration._from_config(
        _vision_language_config(tokenizer), dtype=torch.float32
    )
    return _write(model, _processor(tokenizer), Path(folder), seed)


def build_tiny_qwen3_moe(folder: Path, seed: int = 0) -> Path:
    """The text policy's folder, as above."""
    tokenizer = _tokenizer()
    model = Qwen3MoeForCausalLM._from_config(_text_config(tokenizer), dtype=torch.float32)
    return _write(model, tokenizer, Path(folder), seed)


BUILDERS = {"tiny-qwen3-vl-moe": build_tiny_qwen3_vl_moe, "tiny-qwen3-moe": build_tiny_qwen3_moe}


def _write(
    model: PreTrainedModel,
    processor: Qwen3VLProcessor | PreTrainedTokenizerFast,
    folder: Path,
    seed: int,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    _initialise(model, seed)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    processor.save_pretrained(folder)
    write_weights(model.state_dict().items(), folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges make each word of the built-in tasks one token; any other text falls back to bytes."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS) - 1,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(
        [prefix + word for word in _WORDS for prefix in ("", " ", " ")] * 2, trainer
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}


def _decoder(tokenizer: PreTrainedTokenizerFast, **rope_parameters) -> dict[str, Any]:
    """What both policies' decoders are, but for how positions turn them."""
    ids = _special_ids(tokenizer)
    return dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=EXPERT,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,  # Qwen3-VL-MoE of transformers does not read it and always renormalises; vLLM does
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0, **rope_parameters),
        pad_token_id=ids["<|endoftext|>"],
        bos_token_id=None,
        eos_token_id=ids["<|im_end|>"],
        dtype="float32",
    )


def _text_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **_decoder(tokenizer))


def _vision_language_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLMoeConfig:
    check_layout_is_decidable(HIDDEN, EXPERT)
    ids = _special_ids(tokenizer)
    return Qwen3VLMoeConfig(
        architectures=["Qwen3VLMoeForConditionalGeneration"],
        dtype="float32",
        text_config=_decoder(tokenizer, mrope_section=[6, 5, 5], mrope_interleaved=True),
        vision_config=dict(
            depth=2,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_heads=2,
            patch_size=PATCH,
            temporal_patch_size=2,
            spatial_merge_size=2,
            out_hidden_size=HIDDEN,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1],
            dtype="float32",
        ),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def _processor(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLProcessor:
    geometry = dict(
        patch_size=PATCH,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": 16 * 16, "longest_edge": 128 * 128},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**geometry),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**geometry),
        chat_template=CHAT_TEMPLATE,
    )


@torch.no_grad()
def _initialise(model: torch.nn.Module, seed: int) -> None:
    """Norms one, biases zero, routers N(0, ROUTER_STD^2), everything else N(0, 0.02^2), drawn in the order of names.

    Written out rather than left to the library, so that the seed alone decides the tensors.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            std = ROUTER_STD if name.endswith("mlp.gate.weight") else 0.02
            parameter.normal_(0.0, std, generator=generator)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m molt_core.models.tiny", description="Write a built-in policy."
    )
    parser.add_argument("name", choices=sorted(BUILDERS))
    parser.add_argument("folder", type=Path, help="Hugging Face folder to write")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="of the weights")
    arguments = parser.parse_args(argv)
    print(BUILDERS[arguments.name](arguments.folder, arguments.seed))


if __name__ == "__main__":
    main()
