"""What the frozen optimiser specification means, for every backend: schedule and decay filter."""

from __future__ import annotations

from molt_core.config import OptimizerConfig


def lr_factor(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Factor on ``config.lr`` for optimiser step ``step`` (0-based) of ``total_steps``.

    Linear warm-up over ``warmup_steps`` reaches 1 at step ``warmup_steps - 1``; "linear" then falls towards 0, which it would
    reach at step ``total_steps``.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    return (total_steps - step) / max(1, total_steps - config.warmup_steps)


def decays(dimensions: int, config: OptimizerConfig) -> bool:
    """Whether a parameter of ``dimensions`` dimensions (in the Hugging Face shape) is decayed."""
    return config.decay_filter == "all" or dimensions >= 2
