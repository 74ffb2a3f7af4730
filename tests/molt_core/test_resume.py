"""Invariant 7 on real parts: a run killed three times equals one that never was; one that stopped, or diverged, goes on.

The runs that are compared have a critic, whose weights and moments must come back like the policy's, and a penalty whose
coefficient is steered.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from molt_core.agents.base import Result
from molt_core.divergence import Diverged
from molt_core.export import export
from molt_core.loop import Loop
from molt_core.metrics import RunWriter
from molt_core.models.load import content_hash, load_policy
from molt_core.train.__main__ import train
from molt_core.train.checkpoint import MARKER
from tests.molt_core.test_loop import run_config, run_loop

STEPS = 10
KILLS = (("generation", 5), ("step", 7), ("checkpoint", 8))
"""Saved every two steps, in the background: a save may or may not have been complete when the kill came."""


class TwoTurnAgent:
    """Asks twice, the second time with something added; fails on every eleventh prompt."""

    def __init__(self, task) -> None: ...

    async def run(self, context) -> Result:
        if context.prompt.index % 11 == 5:
            raise RuntimeError("a judge that is down")
        ids, images = list(context.prompt.token_ids), context.prompt.images
        first = await context.generate(ids, images)
        second = await context.generate([*ids, *first.token_ids, 65, 66], images)
        return Result(float((sum(first.token_ids) + sum(second.token_ids)) % 2))


def lockstep_config():
    return run_config(
        task={
            "source": "shapes",
            "agent": "tests.molt_core.test_resume:TwoTurnAgent",
            "eval_items": 4,
        },
        rollout={
            "groups_per_step": 4,
            "samples_per_prompt": 4,
            "sampling": {"max_new_tokens": 16},
        },
        loop={"steps": STEPS, "schedule": "lockstep", "max_staleness": 1},
        algorithm={
            "advantage": "gae",
            "gae_lambda": 0.95,
            "kl": {"coef": 0.1, "place": "reward", "estimator": "k1", "target": 0.01},
        },
        critic={"steps_per_batch": 2, "clip": 0.2},
        optimizer={"lr": 1e-3, "schedule": "linear"},
        checkpoint={"every_steps": 2},
    )


def attempt(number: int, moment: str, step: int, folder: Path, checkpoint: Path) -> int:
    command = [sys.executable, "-m", "tests.molt_core.killed_run", moment, str(step)]
    command += [str(folder / "config.yaml"), "--checkpoint", str(checkpoint)]
    command += ["--run-dir", str(folder), "--attempt", str(number)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    with open(folder / f"{number}.log", "wb") as log:
        ran = subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=300
        )
    return ran.returncode


@pytest.fixture(scope="module")
def straight(ray_session, tiny_checkpoint, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    run_loop(lockstep_config(), tiny_checkpoint, folder)
    return folder


@pytest.fixture(scope="module")
def killed(tiny_checkpoint, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    (folder / "config.yaml").write_text(yaml.safe_dump(lockstep_config().model_dump(mode="json")))
    for number, (moment, step) in enumerate(KILLS, start=1):
        code = attempt(number, moment, step, folder, tiny_checkpoint)
        assert code == -signal.SIGKILL, (folder / f"{number}.log").read_text()[-3000:]
    code = attempt(len(KILLS) + 1, "never", 0, folder, tiny_checkpoint)
    assert code == 0, (folder / f"{len(KILLS) + 1}.log").read_text()[-3000:]
    return folder


def records(folder: Path) -> dict[int, dict]:
    """Each step as its last attempt saw it, without times, attempts and the machine's memory."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        found[record["step"]] = {
            key: value
            for key, value in record.items()
            if key not in ("attempt", "time_unix", "wall_s", "memory_peak_bytes")
            and not key.startswith("t_")
        }
    return found


@pytest.mark.engine
def test_a_run_killed_three_times_equals_an_uninterrupted_one_bit_for_bit(straight, killed):
    expected, found = records(straight), records(killed)
    assert found.keys() == expected.keys() == set(range(STEPS + 1))
    for step in expected:
        assert found[step] == expected[step], step
    policies = [content_hash(folder / "checkpoints" / "policy") for folder in (straight, killed)]
    assert policies[0] == policies[1]
    assert {"value_loss", "critic_grad_norm", "value_clip_fraction"} <= set(expected[STEPS])
    # 0.1 at first, when the policy is the reference and the error at its bound of -0.2; another at every step after it.
    coefficients = [expected[step]["kl_coef"] for step in range(1, STEPS + 1)]
    assert coefficients[:2] == pytest.approx([0.1, 0.098])
    assert len(set(coefficients)) == STEPS


@pytest.mark.engine
def test_each_attempt_went_on_where_it_had_to(killed):
    starts = [
        json.loads(file.read_text()) for file in sorted(killed.glob("attempts/*/resume.json"))
    ]
    steps = [start["step"] for start in starts]
    assert steps[0] in (2, 4) and steps[1] in (4, 6) and steps[2] == 6
    expected = records(killed)
    for start in starts:
        for name in ("policy_version", "mismatch_mean", "mismatch_max", "mismatch_tokens"):
            assert start[name] == expected[start["step"]][name]


@pytest.mark.engine
def test_batches_are_generated_at_the_version_that_lockstep_says(straight):
    lags = [record["lag_mean"] for step, record in sorted(records(straight).items()) if step]
    assert lags == [0] + [1] * (STEPS - 1)
    assert sum(records(straight)[STEPS]["groups_dropped"].values()) > 0, "nothing was replaced"


BAD_THIRD = """
import itertools
import torch.distributed as dist
from molt_core.algo.losses import loss_function, register_loss

calls = itertools.count(1)

@register_loss("bad_third")
def bad_third(tokens, config):
    loss, metrics = loss_function("clipped")(tokens, config)
    return loss * (float("nan") if next(calls) == 3 and dist.get_rank() == 1 else 1.0), metrics
"""
"""As ``clipped``, but that one of two ranks finds no number the third time that it is asked."""


@pytest.mark.engine
def test_a_run_that_stopped_and_one_that_diverged_go_on_with_closed_books(
    ray_session, tiny_checkpoint, tmp_path
):
    """The free-running loop: the engines are at work when it ends, and those groups are generated again."""
    (tmp_path / "bad.py").write_text(BAD_THIRD)
    bad = {"plugins": [str(tmp_path / "bad.py")], "loss": "bad_third"}
    options = {"loop": {"steps": 6, "max_staleness": 1}, "trainer": {"world_size": 2}}

    class StopsAfterTwo(RunWriter):
        def record(self, fields):
            line = super().record(fields)
            if line["step"] == 1:
                loop.request_stop()
            return line

    def saved_steps() -> list[int]:
        markers = tmp_path.glob(f"checkpoints/step-*/{MARKER}")
        return sorted(json.loads(marker.read_text())["step"] for marker in markers)

    loop = Loop(run_config(**options), tiny_checkpoint, StopsAfterTwo(tmp_path, 1, 6))
    assert asyncio.run(loop.run()) is False
    assert saved_steps() == [2]
    # Nothing was told to be saved here: what the third step of this attempt was to go on from is.
    diverging = Loop(
        run_config(**options, algorithm=bad), tiny_checkpoint, RunWriter(tmp_path, 2, 6)
    )
    with pytest.raises(Diverged, match="^step 5: loss nan, .* good checkpoint: .*step-00000004$"):
        asyncio.run(diverging.run())
    assert saved_steps() == [2, 4]
    export(tmp_path / "checkpoints" / "step-00000004", tmp_path / "out")
    assert content_hash(tmp_path / "out") != content_hash(tiny_checkpoint)
    load_policy(tmp_path / "out")
    again = Loop(run_config(**options), tiny_checkpoint, RunWriter(tmp_path, 3, 6))
    assert asyncio.run(again.run()) is True
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["attempt"]) for line in lines] == [
        *((step, 1) for step in range(3)),
        *((step, 2) for step in range(3, 5)),
        *((step, 3) for step in range(5, 7)),
    ]
    last = lines[-1]
    assert last["groups_trained"] == 6 * 4
    assert last["tokens_trained"] == 6 * 4 * 4 * 48
    assert last["optimizer_steps"] == last["policy_version"] == 6
    assert sum(line.get("rollouts", 0) for line in lines[1:]) >= 6 * 4 * 4
    assert max(line["lag_max"] for line in lines[1:]) <= 1
    assert max(line["mismatch_max"] for line in lines) <= 1e-3


def test_sigusr2_is_the_request_to_save_and_stop():
    class Running:
        def __init__(self) -> None:
            self.asked = asyncio.Event()

        def request_stop(self) -> None:
            self.asked.set()

        async def run(self) -> bool:
            os.kill(os.getpid(), signal.SIGUSR2)
            await asyncio.wait_for(self.asked.wait(), 10)
            return False

    async def play():
        return await train(Running())

    assert asyncio.run(play()) is False
