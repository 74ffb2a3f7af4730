"""Train a policy:  python -m molt_core.train CONFIG.yaml --run-dir RUN [--checkpoint FOLDER] [--attempt N]

CONFIG is a ``molt_core.config.RunConfig`` (``molt_core/example.yaml`` is a short one). Writes RUN/metrics.jsonl,
RUN/heartbeat.json and RUN/checkpoints, and goes on from the newest complete checkpoint that is there already; a run that has
all its steps and its policy is left as it is. Exit codes: 0 success, 2 bad configuration or data, found before anything
started, 3 the run ended by its own judgement (the reason is in RUN/attempts/NN/reason.json and on the last line), 4 it was
told to save and stop, and did.

SIGUSR2 to this process, and to no child of it, is "save now and stop": the step in progress is finished and recorded, a
checkpoint of it completed, and the process ends with exit code 4; the same command goes on from there. So the lead at which
a scheduler sends it must be longer than a step and a save. SIGTERM ends the run at once, with the last regular checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import IO

import ray

from molt_core.agents.load import agent_class
from molt_core.algo.advantages import advantage_function
from molt_core.algo.losses import loss_function
from molt_core.algo.registry import load_plugins
from molt_core.config import RunConfig, load_run_config
from molt_core.data import DataError, check_images_are_read, check_prompts
from molt_core.divergence import Diverged
from molt_core.loop import EverythingDropped, Loop
from molt_core.metrics import POLICY, RunWriter, attempts_made, is_finished
from molt_core.models.load import model_folder
from molt_core.placement import PlacementError
from molt_core.rollout.engine import EngineError
from molt_core.rollout.pool import BooksError
from molt_core.rollout.refit import RefitError
from molt_core.train.backend import BUILT_IN, backend_class
from molt_core.train.checkpoint import CheckpointError
from molt_core.types import ContractError

REASONS = {
    Diverged: "DIVERGED",
    EverythingDropped: "EVERYTHING_DROPPED",
    BooksError: "BOOKS_NOT_CLOSED",
    ContractError: "CONTRACT",
    DataError: "DATA",
    RefitError: "REFIT",
    EngineError: "ENGINE",
    CheckpointError: "CHECKPOINT",
    PlacementError: "CONFIG",
    ray.exceptions.RayActorError: "WORKER_DIED",
}

MAY_CHANGE = {"loop": {"steps"}} | dict.fromkeys(("checkpoint", "engine", "trainer"), True)
"""Settings with which a run may go on that it did not begin with: its length, what is kept of it, and where it is computed."""

EXIT_STOPPED = 4
"""Told to save and stop: the state is on disk, the run is not at its end."""


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


async def train(loop: Loop) -> bool:
    """``loop.run()``, with SIGUSR2 as the request to save and stop."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, loop.request_stop)
    return await loop.run()


def reason_of(error: BaseException) -> str | None:
    """The named reason behind ``error``, also where Ray wrapped it."""
    for kind, reason in REASONS.items():
        if isinstance(error, kind) or isinstance(getattr(error, "cause", None), kind):
            return reason
    return None


def own_words(error: BaseException) -> str:
    """What ``error`` says, without the stacks that Ray puts around it at every actor that it passes; the log has those."""
    while isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    return str(error)


def initial_policy(config: RunConfig, given: Path | None) -> Path:
    """The folder that a run begins from: what was given, else ``model.path``.

    Raises FileNotFoundError for a folder without a model, and ValueError where one is still to be made.
    """
    if given is not None:
        return model_folder("--checkpoint:", given).resolve()
    if config.warmup is not None:
        raise ValueError(
            "a warmup section, and no --checkpoint: make its policy with python -m molt_core.sft CONFIG --out FOLDER and give "
            "--checkpoint FOLDER, or remove the section"
        )
    if config.model.path is None:
        raise ValueError(
            f"model.builtin and no --checkpoint: make it with python -m molt_core.models.tiny {config.model.builtin} FOLDER, "
            "and give --checkpoint FOLDER"
        )
    return model_folder("model.path:", config.model.path).resolve()


def check_names(config: RunConfig) -> None:
    """Look up all that ``config`` names, before anything starts. Raises ValueError or OSError that says what is not there."""
    load_plugins(config.algorithm.plugins)
    advantage_function(config.algorithm.advantage), loss_function(config.algorithm.loss)
    agent_class(config.task)
    if config.trainer.backend != BUILT_IN:  # that one is there, and takes seconds to import
        backend_class(config.trainer.backend)
    critic = None if config.critic is None else config.critic.path
    for key, folder in (("algorithm.teacher:", config.algorithm.teacher), ("critic.path:", critic)):
        if folder is not None:
            model_folder(key, folder)
    check_prompts(config.task)


def take(run_dir: Path, config: RunConfig) -> IO[str]:
    """Hold ``run_dir`` as long as the result is open, and keep there what its run is.

    Raises ValueError where another process has it, or it is another run's: all but MAY_CHANGE must be as it was.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    held = open(run_dir / "train.lock", "w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"--run-dir {run_dir}: another process trains there") from None
    record, this = run_dir / "settings.json", config.model_dump(mode="json", exclude=MAY_CHANGE)
    before = json.loads(record.read_text()) if record.exists() else this
    if changed := sorted(key for key in this if this[key] != before.get(key)):
        raise ValueError(
            f"--run-dir {run_dir} holds a run with another {', '.join(changed)}: give another folder, or its settings"
        )
    record.write_text(json.dumps(this, indent=2) + "\n")
    return held


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m molt_core.train", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("config", type=Path, help="resolved run configuration (YAML)")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="Hugging Face folder of the initial policy (default: model.path)",
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="where the record goes")
    parser.add_argument("--attempt", type=int, help="number of this attempt (default: the next)")
    arguments = parser.parse_args(argv)
    run_dir = arguments.run_dir
    try:
        config = load_run_config(arguments.config)
        check_names(config)
        policy = initial_policy(config, arguments.checkpoint)
        check_images_are_read(config, policy)
        # Whoever counts attempts has the folder already.
        held = take(run_dir, config) if arguments.attempt is None else None
        if is_finished(run_dir, config.loop.steps):
            print(f"finished already: the trained policy is {run_dir / POLICY}")
            return 0
    except (ValueError, OSError) as error:
        print(f"{arguments.config}: {error}", file=sys.stderr)
        return 2
    attempt = arguments.attempt or attempts_made(run_dir) + 1
    writer = RunWriter(run_dir, attempt, config.loop.steps)
    reason_file = writer.attempt_folder / "reason.json"
    reason_file.unlink(missing_ok=True)  # of an attempt with the same number
    engines, ranks = config.engine.count, config.trainer_processes
    print(f"starting: engines {engines}, trainer processes {ranks}, policy {policy}", flush=True)
    start_ray(engines + ranks)
    try:
        finished = asyncio.run(train(Loop(config, policy, writer)))
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
        writer.attempt_folder.mkdir(parents=True, exist_ok=True)
        reason_file.write_text(json.dumps({"reason": reason, "detail": own_words(error)}))
        print(f"{reason}: {error}", file=sys.stderr)
        return 3
    finally:
        ray.shutdown()
        if held is not None:
            held.close()
    if not finished:
        print(f"stopped as it was told, its state saved in {writer.checkpoints}", flush=True)
        return EXIT_STOPPED
    print(f"done: the trained policy is {writer.policy_folder}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
