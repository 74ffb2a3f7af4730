"""A training checkpoint as a Hugging Face folder:  python -m molt_core.export CHECKPOINT OUT

CHECKPOINT is one of a run's, RUN/checkpoints/step-00000050. OUT gets its weights in the published layout, with config,
tokenizer, processor and the dtypes of the policy that the run began from; transformers and vLLM load it, as does
``model.path``. Weights are read one at a time, so that a small machine can export what fits on its disk.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from molt_core.models.load import atomic_folder, save_policy, stored_tensors
from molt_core.train.checkpoint import CheckpointError, read_checkpoint
from molt_core.train.state import SavedState

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""safetensors' names."""


def export(checkpoint: Path, out: Path, policy: Path | None = None) -> None:
    """Write ``checkpoint`` to ``out``, whole or not at all. policy: the folder that the run began from, where it has moved.

    Raises CheckpointError for a torn checkpoint, a moved policy folder, and an ``out`` that is there already.
    """
    saved = read_checkpoint(checkpoint)
    policy = Path(policy) if policy else (saved.path / saved.policy).resolve()
    if not (policy / "config.json").is_file():
        raise CheckpointError(
            f"{policy}: the policy that the run began from is not there; say --policy FOLDER"
        )
    if Path(out).exists():
        raise CheckpointError(f"{out}: is there already; give another name or remove it")
    dtypes = {name: DTYPES[stored.dtype] for name, stored in stored_tensors(policy).items()}
    with atomic_folder(out) as scratch:
        save_policy(SavedState(saved.trainer).weights(), policy, scratch, dtypes)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m molt_core.export", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--policy", type=Path, help="the initial policy's folder, where it moved")
    arguments = parser.parse_args(argv)
    try:
        export(arguments.checkpoint, arguments.out, arguments.policy)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
