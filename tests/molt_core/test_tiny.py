"""The built-in policy: deterministic, complete, and the same function to transformers and to vLLM."""

import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from molt_core.config import EngineConfig, ModelConfig
from molt_core.models.builtin import resolve_checkpoint
from molt_core.models.load import (
    check_same_tokens,
    content_hash,
    eos_token_id,
    excluded_token_ids,
    load_policy,
    save_policy,
    write_weights,
)
from molt_core.models.tiny import build_tiny_qwen3_vl_moe
from molt_core.types import ContractError

QUESTION = "what color is the square?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_qwen3_vl_moe(tmp_path_factory.mktemp("tiny") / "policy")


def _images(count):
    """Two different, non-square pictures of seeded noise."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, shape, np.uint8) for shape in ((32, 32, 3), (48, 32, 3))][:count]


def _conversation(images):
    content = [{"type": "image"}] * len(images) + [{"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": content}]


def _inputs(folder, images):
    processor = AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template(_conversation(images), add_generation_prompt=True)
    return processor(text=[text], images=images or None, return_tensors="pt")


@torch.no_grad()
def _logits(model, folder, images):
    return model(**_inputs(folder, images)).logits


def test_same_seed_gives_the_same_files_and_another_seed_does_not(folder, tmp_path):
    again = build_tiny_qwen3_vl_moe(tmp_path / "again")
    other = build_tiny_qwen3_vl_moe(tmp_path / "other", seed=1)
    for file in sorted(path.name for path in folder.iterdir()):
        assert (again / file).read_bytes() == (folder / file).read_bytes(), file
    assert content_hash(other) != content_hash(folder)


def test_weights_on_disk_have_the_published_shapes(folder):
    weights = load_file(folder / "model.safetensors")
    assert weights["model.language_model.layers.1.mlp.experts.gate_up_proj"].shape == (8, 64, 192)
    assert weights["model.language_model.layers.1.mlp.experts.down_proj"].shape == (8, 96, 64)


def test_loading_gives_back_the_model_that_was_written(folder, tmp_path):
    torch.manual_seed(0)
    source = load_policy(folder)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    images = _images(2)
    expected = _logits(source, folder, images)
    loaded = load_policy(save_policy(source, folder, tmp_path / "saved"))
    assert torch.equal(_logits(loaded, folder, images), expected)


def test_a_checkpoint_with_swapped_layout_would_be_another_function(folder):
    """Mixed-up orientation within equal shapes is caught by values: rows of gate_up are outputs, not inputs."""
    weights = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    loaded = load_policy(folder).state_dict()[name]
    assert torch.equal(loaded[3, 17, 5], weights[name][3, 5, 17])


def with_config(folder: Path, target: Path, change: Callable[[dict], object]) -> Path:
    """The folder's config alone, changed."""
    described = json.loads((folder / "config.json").read_text())
    change(described)
    (target / "config.json").write_text(json.dumps(described))
    return target


def test_a_model_whose_two_expert_layouts_look_alike_is_refused(folder, tmp_path):
    alike = with_config(
        folder,
        tmp_path,
        lambda c: c["text_config"].update(moe_intermediate_size=32, hidden_size=64),
    )
    with pytest.raises(ValueError, match="hidden size 64 equals the expert size 32 or twice it"):
        load_policy(alike)


def test_missing_weights_are_refused(folder, tmp_path):
    weights = dict(load_policy(folder).state_dict())
    del weights["lm_head.weight"]
    with pytest.raises(ValueError, match="lm_head.weight"):
        load_policy(save_policy(weights.items(), folder, tmp_path / "incomplete"))


@pytest.mark.parametrize(
    "part, key, value",
    [
        ("vision_config", "spatial_merge_size", 4),
        ("text_config", "norm_topk_prob", False),
        ("text_config", "sliding_window", 64),
    ],
)
def test_what_trainer_and_engine_would_compute_differently_is_refused(
    folder, tmp_path, part, key, value
):
    other = with_config(folder, tmp_path, lambda c: c[part].update({key: value}))
    with pytest.raises(ValueError, match=f"model.path: .*{key} {value} .* supported is"):
        load_policy(other)


def test_a_teacher_of_another_tokenizer_is_refused(folder, tmp_path):
    """Two tokens have changed places: every id would score, and mean something else."""
    check_same_tokens(folder, folder)
    about = json.loads((folder / "tokenizer.json").read_text())
    first, second = list(about["model"]["vocab"])[-2:]
    vocabulary = about["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    with pytest.raises(ContractError, match="algorithm.teacher: .*2 of 379 tokens have another id"):
        check_same_tokens(folder, tmp_path)


def test_content_hash_ignores_how_files_are_cut(folder, tmp_path):
    config = Qwen3VLMoeConfig.from_pretrained(folder)
    model = Qwen3VLMoeForConditionalGeneration(config)
    save_policy(model, folder, tmp_path / "one")
    save_policy(model, folder, tmp_path / "two")
    weights = load_file(tmp_path / "two" / "model.safetensors")
    (tmp_path / "two" / "model.safetensors").unlink()
    names = sorted(weights)
    save_file(
        {n: weights[n] for n in names[::2]}, tmp_path / "two" / "model-00001-of-00002.safetensors"
    )
    save_file(
        {n: weights[n] for n in names[1::2]}, tmp_path / "two" / "model-00002-of-00002.safetensors"
    )
    assert content_hash(tmp_path / "one") == content_hash(tmp_path / "two")


def test_weights_written_in_shards_are_the_same_weights(folder, tmp_path):
    """Cut into many files with an index, as transformers reads them."""
    sharded = save_policy({}.items(), folder, tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    write_weights(load_policy(folder).state_dict().items(), sharded, shard_bytes=200_000)
    assert len(list(sharded.glob("model-*-of-*.safetensors"))) > 5
    assert content_hash(sharded) == content_hash(folder)
    images = _images(1)
    expected = _logits(load_policy(folder), folder, images)
    assert torch.equal(_logits(load_policy(sharded), folder, images), expected)


def test_only_text_and_the_end_of_turn_may_be_sampled(folder):
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    excluded = excluded_token_ids(folder)
    reserved = ["<|endoftext|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>"]
    reserved += ["<|image_pad|>", "<|video_pad|>"]
    assert set(tokenizer.convert_tokens_to_ids(reserved)) <= set(excluded)
    assert set(range(len(tokenizer), 384)) <= set(excluded)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == eos_token_id(folder)
    allowed = set(range(384)) - set(excluded)
    assert eos_token_id(folder) in allowed
    assert set(tokenizer("red, green and all of them?").input_ids) <= allowed


def test_builtin_is_built_once_and_unknown_names_are_refused(tmp_path):
    model = ModelConfig(builtin="tiny-qwen3-vl-moe", builtin_seed=3)
    first = resolve_checkpoint(model, tmp_path)
    written = (first / "config.json").stat().st_mtime_ns
    assert resolve_checkpoint(model, tmp_path) == first
    assert (first / "config.json").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-qwen3-vl-moe-seed3"]
    with pytest.raises(ValueError, match="model.builtin"):
        resolve_checkpoint(ModelConfig(builtin="huge"), tmp_path)
    with pytest.raises(FileNotFoundError, match="model.path"):
        resolve_checkpoint(ModelConfig(path=str(tmp_path / "nowhere")), tmp_path)


def _sample_with_vllm(folder, excluded, image_counts):
    """Runs in a process of its own: sampled ids and their log-probabilities, one pair a request."""
    from molt_core.rollout.engine import prepare_environment

    prepare_environment(EngineConfig())
    from PIL import Image
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        num_gpu_blocks_override=64,
        logprobs_mode="processed_logprobs",
        limit_mm_per_prompt={"image": 2, "video": 0},
        distributed_executor_backend="uni",
    )
    processor = AutoProcessor.from_pretrained(folder)
    requests = []
    for count in image_counts:
        images = _images(count)
        text = processor.apply_chat_template(_conversation(images), add_generation_prompt=True)
        requests.append({"prompt_token_ids": processor.tokenizer(text).input_ids})
        if images:
            pictures = [Image.fromarray(image) for image in images]
            requests[-1]["multi_modal_data"] = {"image": pictures}
    sampling = SamplingParams(
        max_tokens=16,
        logprobs=0,
        seed=1,
        ignore_eos=True,
        logit_bias={token: float("-inf") for token in excluded},
    )
    outputs = [request.outputs[0] for request in engine.generate(requests, sampling)]
    return [
        (list(out.token_ids), [step[t].logprob for step, t in zip(out.logprobs, out.token_ids)])
        for out in outputs
    ]


@pytest.mark.engine
def test_vllm_samples_with_the_log_probabilities_of_transformers(folder, tmp_path):
    """Text, one image, two images: each sampled token's log-probability agrees within 1e-5 (float32)."""
    torch.manual_seed(0)
    model = load_policy(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.add_(noise * (0.1 if parameter.dim() == 1 else 0.05))
    noisy = save_policy(model, folder, tmp_path / "noisy")
    excluded = list(excluded_token_ids(noisy))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        sampled = pool.submit(_sample_with_vllm, noisy, excluded, (0, 1, 2)).result()
    for images, (token_ids, logprobs) in zip(map(_images, (0, 1, 2)), sampled):
        inputs = _inputs(noisy, images)
        prompt_length = inputs["input_ids"].shape[1]
        actions = torch.tensor([token_ids])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], actions], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(
            inputs["mm_token_type_ids"], (0, len(token_ids))
        )
        with torch.no_grad():
            logits = model(**inputs).logits[:, prompt_length - 1 : -1]
        logits[..., excluded] = -torch.inf
        expected = logits.log_softmax(-1).gather(2, actions[..., None]).flatten()
        assert not set(token_ids) & set(excluded)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-5, rtol=0)
