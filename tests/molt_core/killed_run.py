"""``molt_core.train`` in a process that kills itself:  python -m tests.molt_core.killed_run MOMENT STEP CONFIG ...

MOMENT: ``generation`` (the second group after STEP has arrived), ``step`` (the ranks are at work on STEP), ``checkpoint`` (all
of STEP's checkpoint is written, and not yet in its place), ``never``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from molt_core.loop import Loop
from molt_core.train import __main__ as train
from molt_core.train import checkpoint
from molt_core.train.worker import TrainerGroup


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def plant(moment: str, at_step: int) -> None:
    arrived = [0]
    step_in_progress = [0]
    generated, step, trainer_step = Loop._generated, Loop._step, TrainerGroup.step
    sync = checkpoint._sync

    def counting(loop, task):
        arrived[0] += loop.pool.version == at_step
        if arrived[0] == 2:
            die()
        generated(loop, task)

    async def noting(loop, number):
        step_in_progress[0] = number
        return await step(loop, number)

    async def dying(group, *arguments):
        working = asyncio.ensure_future(trainer_step(group, *arguments))
        if step_in_progress[0] == at_step:
            await asyncio.wait([working], timeout=0.05)
            die()
        return await working

    def dying_before_rename(path):
        if f".step-{at_step:08d}" in str(path):
            die()
        sync(path)

    if moment == "generation":
        Loop._generated = counting
    elif moment == "step":
        Loop._step, TrainerGroup.step = noting, dying
    elif moment == "checkpoint":
        checkpoint._sync = dying_before_rename


if __name__ == "__main__":
    plant(sys.argv[1], int(sys.argv[2]))
    sys.exit(train.main(sys.argv[3:]))
