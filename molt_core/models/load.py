"""From a Hugging Face folder to a policy, and back to a folder.

A folder holds everything a run needs besides code: config, weights (published expert layout), tokenizer, processor and
chat template. Whatever the trainers and the engine must agree on is read from it here, once: dtype, ids never sampled, end
of turn, content hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from molt_core.models.layout import Architecture, check_layout_is_decidable
from molt_core.types import ContractError

WEIGHTS_FILE = "model.safetensors"
SHARD_BYTES = 4 * 2**30
END_OF_TURN = "<|im_end|>"
MERGE_SIZE = 2
"""Patches a side that become one token, as rows are laid out for training (``train/collate.py``)."""


def model_folder(key: str, folder: str | Path) -> Path:
    """``folder``, where a model lies in it; raises FileNotFoundError that names ``key``."""
    if not (Path(folder) / "config.json").is_file():
        raise FileNotFoundError(
            f"{key} {folder} is not a Hugging Face model folder (no config.json); download the model first and give its folder"
        )
    return Path(folder)


class atomic_folder:
    """Context manager: a scratch folder beside ``target`` that becomes ``target`` when the block succeeds.

    Where two processes make the same folder, the first to finish wins and the other's work is dropped.
    """

    def __init__(self, target: Path) -> None:
        self.target = Path(target)

    def __enter__(self) -> Path:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(
            tempfile.mkdtemp(prefix=f".{self.target.name}.", dir=self.target.parent)
        )
        self.scratch.chmod(0o755)
        return self.scratch

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            try:
                os.rename(self.scratch, self.target)
                return
            except OSError:
                if not self.target.is_dir():
                    raise
        shutil.rmtree(self.scratch)


def load_policy(folder: Path, dtype: str | torch.dtype = "float32") -> torch.nn.Module:
    """The transformers model of ``folder``: in-memory expert layout, sdpa attention, grouped matrix products for experts.

    Raises ValueError for another architecture, for what trainers and engine would compute differently, for experts that do
    not lie in its files as published or could lie either way, and for weights that do not fit.
    """
    import transformers
    from transformers.utils import logging

    architecture = Architecture.of(folder)
    _check_supported(Path(folder), architecture)
    logging.disable_progress_bar()  # a bar a rank hides what a run says of itself
    model, info = getattr(transformers, architecture.loader).from_pretrained(
        folder,
        dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
        local_files_only=True,
        output_loading_info=True,
    )
    problems = {
        kind: sorted(map(str, info[kind]))
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info[kind]
    }
    if problems:
        raise ValueError(f"{folder}: weights do not fit the model of its config.json: {problems}")
    return model


def _check_supported(folder: Path, architecture: Architecture) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = config.get_text_config()
    if architecture.experts == "stacked":
        check_layout_is_decidable(text.hidden_size, text.moe_intermediate_size)
    expected = {
        "norm_topk_prob": (getattr(text, "norm_topk_prob", True), True),
        "sliding_window": (getattr(text, "sliding_window", None), None),
    }
    if architecture.vision is not None:
        merged = config.vision_config.spatial_merge_size
        expected["vision_config.spatial_merge_size"] = (merged, MERGE_SIZE)
    for key, (found, supported) in expected.items():
        if found != supported:
            raise ValueError(
                f"model.path: {folder} has {key} {found!r} in its config.json; supported is {supported!r}"
            )
    shapes = {name: stored.shape for name, stored in stored_tensors(folder).items()}
    architecture.check_files(shapes, text.hidden_size, folder)


def write_weights(
    named_weights: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Write in-memory weights as published for the config.json in ``folder``: one file, or shards and their index.

    shard_bytes: above which they are cut. dtypes: of each published tensor; None: as they come. At most one shard is held
    beside the weights themselves, so a generator of gathered weights can be written as it comes.
    """
    folder, shard, shards = Path(folder), {}, []
    on_cpu = ((name, tensor.detach().cpu()) for name, tensor in named_weights)
    for name, tensor in Architecture.of(folder).published(on_cpu):
        tensor = tensor.contiguous().to(tensor.dtype if dtypes is None else dtypes[name])
        if shard and _bytes(shard) + tensor.nbytes > shard_bytes:
            shards.append(_write_shard(shard, folder, len(shards)))
            shard = {}
        shard[name] = tensor.clone()
    shards.append(_write_shard(shard, folder, len(shards)))
    if len(shards) == 1:
        (folder / _part(0)).rename(folder / WEIGHTS_FILE)
        return
    where = {}
    for number, (names, _) in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / _part(number)).rename(folder / final)
        where.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": sum(size for _, size in shards)}, "weight_map": where}
    (folder / f"{WEIGHTS_FILE}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_shard(
    shard: dict[str, torch.Tensor], folder: Path, number: int
) -> tuple[list[str], int]:
    save_file(shard, folder / _part(number), metadata={"format": "pt"})
    (folder / _part(number)).chmod(0o644)  # as the files beside it
    return list(shard), _bytes(shard)


def _part(number: int) -> str:
    return f"part-{number}.safetensors"


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def save_policy(
    weights: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
    source_folder: Path,
    out_folder: Path,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Path:
    """Write ``weights`` (in-memory layout) with the config, tokenizer and processor of ``source_folder``.

    dtypes: see ``write_weights``.
    """
    source_folder, out_folder = Path(source_folder), Path(out_folder)
    out_folder.mkdir(parents=True, exist_ok=True)
    for file in source_folder.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy2(file, out_folder / file.name)
    if isinstance(weights, torch.nn.Module):
        weights = weights.state_dict().items()
    write_weights(weights, out_folder, dtypes=dtypes)
    return out_folder


class Stored(NamedTuple):
    """A tensor in a checkpoint folder; dtype in safetensors' spelling, e.g. "BF16"."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a folder in the order of names, from the headers of its files. Empty where it has none."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():
                part = handle.get_slice(name)
                found[name] = Stored(file, tuple(part.get_shape()), part.get_dtype())
    return dict(sorted(found.items()))


def iterate_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of a folder in the order of names, in their layout on disk, one at a time."""
    stored = stored_tensors(folder)
    if not stored:
        raise FileNotFoundError(f"{folder}: no .safetensors file; convert the checkpoint first")
    for name, tensor in stored.items():
        with safe_open(tensor.file, framework="pt") as handle:
            yield name, handle.get_tensor(name)


def content_hash(folder: Path) -> str:
    """sha256 over the tensors by name (name, dtype, shape, bytes): equal weights hash alike however the files are cut."""
    digest = hashlib.sha256()
    for name, tensor in iterate_weights(folder):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def eos_token_id(folder: Path) -> int:
    """The id that ends an assistant's turn: the one token besides ordinary text that may be sampled."""
    token_id = _tokenizer(folder).token_to_id(END_OF_TURN)
    if token_id is None:
        raise ValueError(
            f"{folder}: the tokenizer has no {END_OF_TURN}; only Qwen-style chat models are supported"
        )
    return token_id


def excluded_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that must never be sampled, sorted: special tokens but the end of turn, and rows of the vocabulary without a token.

    A sampled placeholder would be taken for an image by the next forward pass; a row without a token cannot be decoded. The
    engine and the training softmax get this same list, so that both speak of one distribution.
    """
    tokenizer = _tokenizer(folder)
    config = json.loads((Path(folder) / "config.json").read_text())
    vocabulary = config.get("text_config", config)["vocab_size"]
    known = set(tokenizer.get_vocab(with_added_tokens=True).values())
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    placeholders = {
        value
        for key, value in config.items()
        if key.endswith("_token_id") and key != "eos_token_id"
    }
    excluded = (
        (set(range(vocabulary)) - known) | special | {p for p in placeholders if isinstance(p, int)}
    )
    return tuple(sorted(i for i in excluded - {eos_token_id(folder)} if i < vocabulary))


def expert_layers(folder: Path) -> tuple[int, ...]:
    """Numbers of the decoder layers that hold a mixture of experts, the rest being dense; transformers' own rule."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    layers = range(text.num_hidden_layers if getattr(text, "num_experts", 0) else 0)
    return tuple(
        n
        for n in layers
        if n not in text.mlp_only_layers and (n + 1) % text.decoder_sparse_step == 0
    )


def check_same_tokens(policy: Path, other: Path) -> None:
    """Raises ContractError unless an id means the same to both: ``other`` scores what ``policy`` has sampled."""
    ours, theirs = (_tokenizer(folder).get_vocab() for folder in (policy, other))
    if ours != theirs:
        differ = sum(theirs.get(token) != number for token, number in ours.items())
        raise ContractError(
            f"algorithm.teacher: {other} has another tokenizer than the policy ({differ} of {len(ours)} tokens have another id "
            "there, or none); take a teacher of the same model family"
        )


def _tokenizer(folder: Path):
    from tokenizers import Tokenizer

    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder}: no tokenizer.json")
    return Tokenizer.from_file(str(file))
