"""One number a run: which recorded field, how it is summed up, and how large a difference would matter.

Endpoint(name="held-out accuracy", field="eval_reward_mean", summary="at_last_step", unit="share", ...)
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

STEPS = "steps"
"""Pseudo-field of a rate: the number of steady steps, so that ``wall_s / steps`` is seconds a step."""


CUMULATIVE = frozenset(
    f"{unit}_{book}"
    for unit in ("tokens", "groups")
    for book in ("generated", "trained", "dropped")
) | {"tokens_evaluation", "tokens_probe", "optimizer_steps", "policy_version"}
"""Fields that count from the start of a run: a rate takes what each step added to them."""


class Strict(BaseModel):
    """Base of the plan's models: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Rate(Strict):
    """Total over total across steady steps, never a mean of ratios. ``steps`` counts the steps themselves."""

    numerator: Annotated[tuple[str, ...], Field(min_length=1)]
    denominator: Annotated[tuple[str, ...], Field(min_length=1)]

    def __str__(self) -> str:
        return f"({' + '.join(self.numerator)}) / ({' + '.join(self.denominator)})"


class Endpoint(Strict):
    """One number a run, and how large a difference between two arms would matter."""

    name: str
    field: str | Rate = Field(description="a metrics.jsonl field, or a rate of several")
    summary: Literal[
        "at_last_step",
        "final_window_mean",
        "total_rate",
        "auc",
        "steps_to_threshold",
        "seconds_to_threshold",
    ]
    window: int | None = Field(None, gt=0, description="records of final_window_mean")
    threshold: float | None = Field(None, description="level of the field to reach from below")
    unit: str
    direction: Literal["higher", "lower"] = Field(description="which way is better")
    margin: float = Field(gt=0, description="largest difference that does not matter")
    margin_reason: str = Field(min_length=1, description="one sentence: why this margin")
    condition: str | None = Field(
        None,
        min_length=1,
        description="what any result holds under; the sentence that may be written says it",
    )
    scale: Literal["absolute", "ratio"] = Field(
        description="absolute: margin in the unit; ratio: margin 0.1 is [1/1.1, 1.1]"
    )
    primary: bool = False
    non_inferiority: bool = Field(False, description="declared in advance, one-sided claim")
    ceiling: float | Literal["unbounded"] | None = Field(
        None,
        description="best reachable value, e.g. 1.0 of an accuracy, or unbounded; without one no equality of learning "
        "is claimed",
    )
    quantity: Literal["speed", "learning", "other"] | None = Field(
        None,
        description="what is measured, where the fields' names do not tell: it decides what guards a claim of equality",
    )

    @model_validator(mode="after")
    def _summary_fits_field(self) -> Endpoint:
        if (self.summary == "total_rate") != isinstance(self.field, Rate):
            raise ValueError(
                f"endpoint {self.name}: summary total_rate needs field: {{numerator: [...], denominator: [...]}}, "
                f"and the other summaries need one field name; got {self.summary} of {self.field}"
            )
        if self.scale == "ratio" and self.margin >= 1:
            raise ValueError(
                f"endpoint {self.name}: margin {self.margin:g} of scale ratio is {self.margin:.0%}, a factor of "
                f"{1 + self.margin:g}; write 0.1 for 10 %"
            )
        if (self.summary == "final_window_mean") != (self.window is not None):
            raise ValueError(
                f"endpoint {self.name}: window belongs to final_window_mean and is required there"
            )
        if self.summary.endswith("_to_threshold") != (self.threshold is not None):
            raise ValueError(
                f"endpoint {self.name}: threshold belongs to steps_to_threshold and seconds_to_threshold and is required there"
            )
        if self.threshold is not None and self.direction != "lower":
            raise ValueError(
                f"endpoint {self.name}: its value is when the threshold is reached, so direction is lower"
            )
        return self

    @property
    def fields(self) -> tuple[str, ...]:
        """Every metrics field the endpoint reads."""
        if isinstance(self.field, str):
            return (self.field,)
        names = self.field.numerator + self.field.denominator
        return tuple(name for name in names if name != STEPS)

    @property
    def kind(self) -> Literal["speed", "learning", "other"]:
        """Speed where a duration enters, learning where reward is measured: other checks guard each."""
        if self.quantity is not None:
            return self.quantity
        if self.summary == "seconds_to_threshold" or any(
            name.endswith("_s") for name in self.fields
        ):
            return "speed"
        rewards = all(name.startswith(("eval_", "reward_")) for name in self.fields)
        return "learning" if rewards else "other"

    @property
    def includes_waiting(self) -> bool:
        """True where the trainer's wait for generation is part of the measured time."""
        return self.summary == "seconds_to_threshold" or any(
            name in ("wall_s", "t_wait_s") for name in self.fields
        )
