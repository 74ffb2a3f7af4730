"""The end of a run whose numbers are none: noticed before the optimiser steps on them, or after a step that spoilt weights.

A loss or gradient norm that is not finite is not stepped on. A finite one can still leave weights that are not, or that give
log-probabilities which are not: the size of the step and the probe after it show that. Either way the batch is left behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from molt_core.metrics import RunWriter
from molt_core.train.checkpoint import CheckpointStore


class Diverged(RuntimeError):
    """A number that decides about a step, or that the step left behind, is not finite."""


def check_finite(
    step: int,
    numbers: Mapping[str, float],
    writer: RunWriter,
    store: CheckpointStore,
    *,
    stepped: bool = False,
    **batch: Any,
) -> None:
    """Raise Diverged unless all ``numbers`` of ``step`` are finite, with ``batch`` in the attempt's folder.

    stepped: the optimiser has stepped on it. The message names the newest complete checkpoint, or says that there is none.
    """
    if np.isfinite(list(numbers.values())).all():
        return
    what = f"step {step}: " + ", ".join(f"{name} {value}" for name, value in numbers.items())
    file = writer.dump("diverged_batch.pkl", {"reason": what, **batch})
    fate = "the weights are spoilt by that step" if stepped else "the step on that was not taken"
    complete, _ = store.scan()
    last = complete[-1].path if complete else "none, as checkpoint.every_steps saved none yet"
    raise Diverged(f"{what}; {fate}, its batch is in {file}; last good checkpoint: {last}")
