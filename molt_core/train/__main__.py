"""Train a policy:  python -m molt_core.train CONFIG.yaml --checkpoint FOLDER --run-dir RUN [--attempt N]

CONFIG is a ``molt_core.config.RunConfig``. Writes RUN/metrics.jsonl and RUN/heartbeat.json. Exit codes: 0 success, 2 bad
configuration, 3 the run ended by its own judgement; the reason is in RUN/attempts/NN/reason.json and on the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

import ray
from pydantic import ValidationError

from molt_core.algo.registry import load_plugins
from molt_core.config import load_run_config
from molt_core.loop import Diverged, EverythingDropped, Loop
from molt_core.metrics import RunWriter
from molt_core.rollout.engine import EngineError
from molt_core.rollout.pool import BooksError
from molt_core.rollout.refit import RefitError
from molt_core.types import ContractError

REASONS = {
    Diverged: "DIVERGED",
    EverythingDropped: "EVERYTHING_DROPPED",
    BooksError: "BOOKS_NOT_CLOSED",
    ContractError: "CONTRACT",
    RefitError: "REFIT",
    EngineError: "ENGINE",
    ray.exceptions.RayActorError: "WORKER_DIED",
}


def start_ray(places: int) -> None:
    """Join the Ray cluster that RAY_ADDRESS names, else start one here with room for ``places`` actors."""
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=True, logging_level=logging.ERROR)
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        num_cpus=max(places, os.cpu_count() or 1),
        include_dashboard=False,
        logging_level=logging.ERROR,
        _temp_dir=tempfile.mkdtemp(
            prefix="ray-"
        ),  # short: socket paths below it are limited to 107 bytes
    )


def reason_of(error: BaseException) -> str | None:
    """The named reason behind ``error``, also where Ray wrapped it."""
    for kind, reason in REASONS.items():
        if isinstance(error, kind) or isinstance(getattr(error, "cause", None), kind):
            return reason
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m molt_core.train", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("config", type=Path, help="resolved run configuration (YAML)")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="initial Hugging Face folder"
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="where the record goes")
    parser.add_argument("--attempt", type=int, default=1)
    arguments = parser.parse_args(argv)
    try:
        config = load_run_config(arguments.config)
        load_plugins(config.algorithm.plugins)
    except (ValidationError, ValueError, OSError) as error:
        print(f"{arguments.config}: {error}", file=sys.stderr)
        return 2
    writer = RunWriter(arguments.run_dir, arguments.attempt, config.loop.steps)
    start_ray(config.engine.count + config.trainer.world_size)
    try:
        asyncio.run(Loop(config, arguments.checkpoint.resolve(), writer).run())
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
        folder = arguments.run_dir / "attempts" / f"{arguments.attempt:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reason.json").write_text(json.dumps({"reason": reason, "detail": str(error)}))
        print(f"{reason}: {error}", file=sys.stderr)
        return 3
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
