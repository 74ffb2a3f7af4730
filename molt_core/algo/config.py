"""What a run is told about its algorithm, and which combinations are refused before it starts, each with its reason.

A choice that trains something else than it seems to (off-policy data without correction, a penalty whose gradient is another's)
or that would be read by nothing is an error here. Light to import (no torch). The formulas are beside the functions.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from molt_core.strict import Strict

GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
TOKEN_REWARD_ESTIMATORS = ("reinforce_pp", "gae")
BUILT_IN_WITHOUT_TEACHER = (*GROUP_ESTIMATORS, *TOKEN_REWARD_ESTIMATORS, "flash_reinforce")
BUILT_IN_WITHOUT_CRITIC = (
    *GROUP_ESTIMATORS,
    "reinforce_pp",
    "flash_reinforce",
    "on_policy_distillation",
)
WITHOUT_TOKEN_REWARD = (*GROUP_ESTIMATORS, "flash_reinforce", "on_policy_distillation")
ESTIMATORS = (*BUILT_IN_WITHOUT_CRITIC, "gae")
LOSSES = ("clipped", "gspo", "cispo", "policy_gradient")
NOT_READ_BY = {
    "gamma": ("advantage", WITHOUT_TOKEN_REWARD),
    "gae_lambda": ("advantage", BUILT_IN_WITHOUT_CRITIC),
    "clip_low": ("loss", ("cispo", "policy_gradient")),
    "clip_high": ("loss", ("policy_gradient",)),
    "dual_clip": ("loss", ("gspo", "cispo", "policy_gradient")),
}
"""Options of ``AlgorithmConfig``, and the built-in choices that they mean nothing to."""


CORRECTION_SCHEMES: dict[str, dict[str, object]] = {
    "off": {"level": "off"},
    "tis": {"level": "token", "mode": "truncate", "high": 2.0},
    "icepop": {"level": "token", "mode": "mask", "low": 0.5, "high": 5.0},
    "sequence_masked_tis": {
        "level": "geometric",
        "mode": "mask",
        "low": 0.99,
        "high": 1.01,
        "truncate_kept": 2.0,
    },
    "binary_kl": {"level": "token", "mode": "mask", "gate": "binary_kl", "high": 0.05},
    "tv": {"level": "token", "mode": "mask", "gate": "tv", "high": 0.15},
}
"""Published combinations by name, sources in ``algo/importance.py``: ``correction: icepop`` stands for its fields."""


class CorrectionConfig(Strict):
    """Importance correction for the difference between the sampling and the training policy (lag and numerics).

    Fields, or the name of one of ``CORRECTION_SCHEMES``.
    """

    level: Literal["off", "token", "sequence", "geometric"] = Field(
        "token", description="unit of the ratio: a token, or a rollout's product or geometric mean"
    )
    mode: Literal["truncate", "clip", "mask"] = Field(
        "truncate", description="min(ratio, high) | ratio within low..high | rho inside, 0 outside"
    )
    gate: Literal["ratio", "binary_kl", "tv"] = Field(
        "ratio", description="what is compared with low and high: the ratio, or a divergence"
    )
    low: float = Field(0.0, ge=0)
    high: float = Field(2.0, gt=0)
    truncate_kept: float | None = Field(
        None,
        gt=0,
        description="bound on rho of the tokens that a mask keeps; none leaves it as it is",
    )

    @model_validator(mode="before")
    @classmethod
    def _named_scheme(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value not in CORRECTION_SCHEMES:
            raise ValueError(
                f"algorithm.correction: {value!r} is unknown; choose one of {sorted(CORRECTION_SCHEMES)}, or give its fields"
            )
        return CORRECTION_SCHEMES[value]

    @model_validator(mode="after")
    def _a_scheme_with_a_meaning(self) -> CorrectionConfig:
        where = "algorithm.correction."
        if self.low > self.high:
            raise ValueError(f"{where}low {self.low} is above {where}high {self.high}: swap them")
        if self.gate == "ratio" and self.level != "off" and not self.low <= 1 <= self.high:
            raise ValueError(
                f"{where}low {self.low} and high {self.high} leave out the ratio 1, that of a token which is on policy; set "
                "low to 1 or less and high to 1 or more"
            )
        if self.mode == "truncate" and self.low > 0:
            raise ValueError(f"{where}mode: truncate has no lower bound; set low: 0, or mode: clip")
        if self.mode != "mask" and self.level == "geometric":
            raise ValueError(
                f"{where}level: geometric is a gate: a mean ratio is the importance weight of no sample; set mode: mask, "
                "or level: sequence"
            )
        if self.mode != "mask" and self.truncate_kept is not None:
            raise ValueError(f"{where}truncate_kept bounds what a mask keeps; set mode: mask")
        if self.gate != "ratio":
            if self.mode != "mask":
                raise ValueError(
                    f"{where}gate: {self.gate} is a divergence and no weight; set mode: mask"
                )
            if self.level == "geometric":
                raise ValueError(
                    f"{where}gate: {self.gate} is averaged over a rollout by level: sequence; a geometric mean is of ratios"
                )
            if self.low > 0:
                raise ValueError(
                    f"{where}gate: {self.gate} is 0 where the policies agree; low would drop just those: set low: 0"
                )
        if self.gate == "tv" and self.high >= 1:
            raise ValueError(
                f"{where}gate: tv lies between 0 and 1; high {self.high} masks nothing, set it below 1"
            )
        return self


class KLConfig(Strict):
    """One KL penalty. Which combinations have the right gradient, and why the others are refused: ``algo/kl.py``."""

    coef: float = Field(0.0, ge=0, description="weight of the penalty; 0 is off")
    place: Literal["reward", "loss"] = Field(
        "loss", description="subtracted from the token's reward, or added to the token's loss"
    )
    base: Literal["reference", "behaviour"] = Field(
        "reference",
        description="reference: the initial weights, frozen; behaviour: the policy that sampled the token",
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k2", description="k1 in the reward, k2 or k3 in the loss"
    )
    target: float | None = Field(
        None,
        gt=0,
        description="kl_reference, in nats a token, that coef is steered to from step to step; none: coef stays as it is",
    )
    gain: float = Field(
        0.1, gt=0, le=1, description="share of the error, itself within 0.2, by which coef changes"
    )

    @model_validator(mode="after")
    def _a_gradient_that_is_meant(self) -> KLConfig:
        where = "algorithm.kl."
        if self.target is None and self.gain != type(self).model_fields["gain"].default:
            raise ValueError(
                f"{where}gain is not read without {where}target; remove it, or set one"
            )
        if self.coef == 0:
            if self.target is not None:
                raise ValueError(
                    f"{where}target steers a coefficient by factors, and 0 stays 0; set {where}coef to begin with"
                )
            return self
        if self.target is not None and self.base == "behaviour":
            raise ValueError(
                f"{where}target is a KL to the reference; set base: reference, or remove target"
            )
        if self.place == "reward" and self.base == "behaviour":
            raise ValueError(
                f"{where}base: behaviour is the policy that is rewarded: its KL to itself is 0; set base: reference"
            )
        if self.place == "reward" and self.estimator != "k1":
            raise ValueError(
                f"{where}estimator: {self.estimator} as a reward has a biased gradient, as its own dependence on the policy "
                "is not differentiated; set estimator: k1"
            )
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                f"{where}estimator: k1 as a loss has the gradient of no penalty: 0 on average against a reference, and the "
                "wrong sign against the behaviour policy; set estimator: k2 or k3, or place: reward"
            )
        return self


class AlgorithmConfig(Strict):
    """Estimator, loss and aggregation, by name. Built-in ones state their formula and source in ``molt_core/algo``."""

    advantage: str = Field(
        "grpo",
        description="grpo | dr_grpo | rloo | reinforce_pp | reinforce_pp_baseline | flash_reinforce | gae | "
        "on_policy_distillation | a name registered from a user's file",
    )
    loss: str = Field(
        "clipped",
        description="clipped | gspo | cispo | policy_gradient | a name registered from a user's file",
    )
    plugins: tuple[str, ...] = Field(
        (), description="Python files that register estimators or losses"
    )
    clip_low: float = Field(0.2, ge=0, le=1)
    clip_high: float = Field(0.28, ge=0)
    dual_clip: float | None = Field(
        None, gt=1, description="bound on the ratio in clipped losses of negative advantage"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount of REINFORCE++ and GAE")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="lambda of GAE")
    kl: KLConfig = KLConfig()
    teacher: str | None = Field(
        None, description="Hugging Face folder of the teacher of on-policy distillation"
    )
    entropy_coef: float = Field(0.0, ge=0, description="entropy bonus in the loss; 0 is off")
    proximal: Literal["current", "rollout"] = Field(
        "current",
        description="old policy of the clipped ratio: the policy before this step (recomputed) or the behaviour policy",
    )
    correction: CorrectionConfig = CorrectionConfig()
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "constant"] = "token_mean"
    aggregation_length: int | None = Field(
        None, gt=0, description="length L of aggregation: constant, in tokens"
    )

    @model_validator(mode="after")
    def _known_names(self) -> AlgorithmConfig:
        built_in = {"advantage": ESTIMATORS, "loss": LOSSES}
        for key, names in built_in.items():
            if not self.plugins and getattr(self, key) not in names:
                raise ValueError(
                    f"algorithm.{key}: {getattr(self, key)} is unknown; choose one of {', '.join(names)}, or name the "
                    "file that registers it under algorithm.plugins"
                )
        return self

    @model_validator(mode="after")
    def _no_double_correction(self) -> AlgorithmConfig:
        if self.proximal == "rollout" and self.correction.level != "off":
            raise ValueError(
                "algorithm.proximal: rollout already divides by the behaviour policy; set algorithm.correction.level: off, "
                "or algorithm.proximal: current to keep the correction"
            )
        if self.proximal == "rollout" and self.loss == "policy_gradient":
            raise ValueError(
                "algorithm.loss: policy_gradient has no ratio to a proximal policy, so nothing would correct for the "
                "behaviour policy; set algorithm.proximal: current"
            )
        in_loss = self.kl.coef > 0 and self.kl.place == "loss"
        if self.proximal == "rollout" and in_loss and self.kl.base == "reference":
            raise ValueError(
                "algorithm.kl against the reference is an expectation over the policy; algorithm.proximal: rollout corrects "
                "the clipped ratio alone; set algorithm.proximal: current, with a correction"
            )
        return self

    def with_kl_coef(self, coef: float) -> AlgorithmConfig:
        """The same with another ``kl.coef``, where a target steers it."""
        return self.model_copy(update={"kl": self.kl.model_copy(update={"coef": coef})})

    @property
    def frozen_policies(self) -> tuple[str, ...]:
        """Policies that are loaded and never stepped, whose log-probabilities the sampled tokens need."""
        reference = ("reference",) if self.kl.coef > 0 and self.kl.base == "reference" else ()
        return reference + (("teacher",) if self.teacher is not None else ())

    @property
    def scored_policies(self) -> tuple[str, ...]:
        """Those and, where a token's reward is made of its own log-probability, the stepped policy, due before the step."""
        needs_own = self.teacher is not None or (self.kl.coef > 0 and self.kl.place == "reward")
        return (*self.frozen_policies, *(("policy",) if needs_own else ()))

    @model_validator(mode="after")
    def _the_policies_it_needs(self) -> AlgorithmConfig:
        if self.advantage == "on_policy_distillation" and self.teacher is None:
            raise ValueError(
                "algorithm.advantage: on_policy_distillation needs a teacher; set algorithm.teacher to its folder"
            )
        if self.teacher is not None and self.advantage in BUILT_IN_WITHOUT_TEACHER:
            raise ValueError(
                f"algorithm.teacher is not read by algorithm.advantage: {self.advantage}; remove it, or set "
                "algorithm.advantage: on_policy_distillation"
            )
        return self

    @model_validator(mode="after")
    def _no_option_without_effect(self) -> AlgorithmConfig:
        for option, (chooser, unread_by) in NOT_READ_BY.items():
            changed = getattr(self, option) != type(self).model_fields[option].default
            if changed and getattr(self, chooser) in unread_by:
                raise ValueError(
                    f"algorithm.{option} is not read by algorithm.{chooser}: {getattr(self, chooser)}; remove it, or choose "
                    "one that reads it"
                )
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"algorithm.dual_clip {self.dual_clip} must lie above 1 + clip_high, {1 + self.clip_high:g}"
            )
        if (self.aggregation == "constant") != (self.aggregation_length is not None):
            raise ValueError(
                "algorithm.aggregation: constant and algorithm.aggregation_length (e.g. rollout.sampling.max_new_tokens) "
                "go together: set both or neither"
            )
        if (
            self.kl.coef > 0
            and self.kl.place == "reward"
            and self.advantage in WITHOUT_TOKEN_REWARD
        ):
            raise ValueError(
                f"algorithm.kl.place: reward is not read by algorithm.advantage: {self.advantage}, which has one reward a "
                "rollout; set place: loss, or advantage: reinforce_pp"
            )
        return self
