"""The end of a run whose numbers are none: noticed before the optimiser steps on them, or after a step that spoilt weights.

A loss or gradient norm that is not finite is not stepped on. A finite one can still leave weights that are not, or that give
log-probabilities which are not: the size of the step, the probe after it, and every token that the engine samples show that.

Whoever meets such a number raises ``NotFinite`` with the version of the weights that it was met under; ``ended_by`` says what
it means. Where these weights give numbers all the same they are good, and become a checkpoint like any other: the batch is
among its groups, so the same run meets it again there. Where they give none, a step has spoilt them, or, before any step, they
were given so, which is no divergence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.exceptions import RayError

from molt_core.metrics import RunWriter
from molt_core.train.checkpoint import CheckpointError, Saver
from molt_core.types import ContractError, NotFinite

if TYPE_CHECKING:
    from molt_core.train.worker import TrainerGroup


class Diverged(RuntimeError):
    """A number that decides about a step, or that the step left behind, is not finite."""


def check_finite(step: int, numbers: Mapping[str, float], **batch: Any) -> None:
    """Raise NotFinite unless all ``numbers`` are finite that decide about ``step``, or that it left behind.

    batch: what they are of, where the step on it was not taken; the weights are those of the step before then.
    """
    if not np.isfinite(list(numbers.values())).all():
        what = f"step {step}: " + ", ".join(f"{name} {value}" for name, value in numbers.items())
        raise NotFinite(what, step - bool(batch), **batch)


async def ended_by(
    error: NotFinite,
    writer: RunWriter,
    trainer: TrainerGroup,
    saver: Saver,
    *,
    record: Mapping[str, Any],
    state: Callable[[], Mapping[str, Any]],
    trained_on: Mapping[str, Any],
) -> Diverged | ContractError:
    """What a run that has met ``error`` ends with, once its batch is in the attempt's folder and its good state saved.

    record and state: of the last step, as a checkpoint has them; trained_on: its batch. The message names the newest
    checkpoint of before the weights were spoilt. It is a ContractError where the weights are those that the run was given.
    """
    version, batch, sound, trouble = error.version, error.batch, False, ""
    content = {"reason": str(error), **(batch or trained_on), "trained_on": trained_on}
    file = writer.dump("diverged_batch.pkl", content)
    try:
        sound = bool(batch) and await trainer.gives_numbers(batch["batch"])
        await saver.wait()
        if sound and version > max((c.step for c in saver.store.scan()[0]), default=0):
            await saver.begin(version, state())
            saver.commit(record)
            await saver.wait()
    except (CheckpointError, RayError) as failure:  # must not hide that the run has diverged
        trouble = f" (more could not be done: {failure})"
    if version == 0 and "rollouts" not in batch:  # nothing has been trained on yet
        return ContractError(
            f"{error}, under the weights that the run was given, before any step: see {saver.policy} and model.dtype"
        )
    if batch:
        fate = f"the step on that was not taken, its batch is in {file}"
        if not (sound or trouble):
            fate += f"; the weights of step {version} give no numbers on it either"
    else:
        fate = f"the weights are spoilt by step {version}"
        if trained_on:
            fate += f", the batch of step {trained_on['step']} is in {file}"
    good = [c.path for c in saver.store.scan()[0] if c.step < version + sound]
    last = good[-1] if good else f"none but the policy that it began from, {saver.policy}"
    return Diverged(f"{error}; {fate}; last good checkpoint: {last}{trouble}")
