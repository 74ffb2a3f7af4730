"""What a step of the trainer, and a probe of the engines, come to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from molt_core.train.critic import CriticResult


@dataclass(frozen=True)
class StepResult:
    """One optimiser step. ``sums`` over all action tokens of the batch (see ``objective.forward_backward``).

    stepped: False where the optimiser was left alone, because loss or gradient norm is not finite, nothing was kept, or the
    critic is stepped alone.
    update_ratio: norm of the step over that of the weights, None without one. memory_peak_bytes: of the rank with the most.
    critic_s: what the critic added to the time of the step.
    """

    sums: Mapping[str, Any]
    grad_norm: float
    stepped: bool
    forward_backward_s: float
    optimizer_s: float
    started: float
    ended: float
    update_ratio: float | None = None
    memory_peak_bytes: int = 0
    critic: CriticResult | None = None
    critic_s: float = 0.0

    @property
    def decisive(self) -> dict[str, float]:
        """What must be finite, by a name for messages."""
        of_critic = {} if self.critic is None else self.critic.decisive
        of_step = {} if self.update_ratio is None else {"update ratio": self.update_ratio}
        return {"loss": self.sums["loss"], "gradient norm": self.grad_norm, **of_critic, **of_step}


@dataclass(frozen=True)
class ProbeResult:
    """|trainer - engine| log-probability of fresh tokens, and how many were left out for a router tie."""

    differences: np.ndarray
    tied: int

    @classmethod
    def of(cls, differences: np.ndarray, tied: np.ndarray, doubt_above: float) -> ProbeResult:
        """``[N]`` each. A tie leaves out only what it may explain: a difference that would be in doubt."""
        left_out = tied & (differences > doubt_above) & np.isfinite(differences)
        return cls(differences[~left_out], int(left_out.sum()))

    @classmethod
    def joined(cls, parts: Collection[ProbeResult]) -> ProbeResult:
        return cls(np.concatenate([p.differences for p in parts]), sum(p.tied for p in parts))

    @property
    def largest(self) -> float:
        """0 where every token was left out."""
        return float(self.differences.max(initial=0.0))

    @property
    def p99(self) -> float:
        """0 where every token was left out."""
        return (
            float(np.quantile(self.differences.astype(np.float64), 0.99))
            if len(self.differences)
            else 0.0
        )
