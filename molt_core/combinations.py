"""Settings of a run that do not go together, each refused before anything starts with the key at fault and what to set it to.

Each function looks at one matter, across the sections of a ``RunConfig``, and raises ValueError; what one section alone can
tell is checked where it is defined. A choice that would train something else than it says is an error here, not a warning.
"""

from __future__ import annotations

from difflib import get_close_matches
from math import lcm
from typing import TYPE_CHECKING

from molt_core.algo.config import BUILT_IN_WITHOUT_CRITIC, ESTIMATORS, GROUP_ESTIMATORS, LOSSES
from molt_core.fields import FIELDS, NUMBERS, steps_between

if TYPE_CHECKING:
    from molt_core.config import RunConfig


def best_is_measured(config: RunConfig) -> None:
    checkpoint = config.checkpoint
    name, every = checkpoint.keep_best, checkpoint.every_steps
    if every is None and (name is not None or checkpoint.best_is != "highest"):
        raise ValueError(
            "checkpoint.keep_best and best_is are not read without checkpoint.every_steps; set it, or remove them"
        )
    if name is None:
        return
    if name not in NUMBERS:
        if config.algorithm.plugins:
            return  # an indicator of a user's loss has a name that only a step tells
        close = ", ".join(get_close_matches(name, sorted(NUMBERS))) or "eval_reward_mean"
        raise ValueError(
            f"checkpoint.keep_best: {name!r} is no number that a run records; choose another field, e.g. {close}"
        )
    recorded = steps_between(name, config)
    if recorded is None:
        raise ValueError(
            f"checkpoint.keep_best: {name} is recorded {FIELDS[name]}, which this run is not; choose another field"
        )
    if lcm(every, recorded) >= config.loop.steps:
        raise ValueError(
            f"checkpoint.keep_best: {name} is recorded every {recorded} steps, and no checkpoint before the last of "
            f"{config.loop.steps} has it; set checkpoint.every_steps to a multiple of it, not {every}"
        )


def correction_where_off_policy(config: RunConfig) -> None:
    algorithm, staleness = config.algorithm, config.loop.max_staleness
    if algorithm.correction.level == "off" and algorithm.proximal != "rollout":
        if staleness > 0:
            raise ValueError(
                f"loop.max_staleness {staleness} trains on off-policy data without correction; set "
                "algorithm.correction.level: token, or loop.max_staleness: 0"
            )
        if config.model.dtype != "float32":
            raise ValueError(
                f"model.dtype: {config.model.dtype} makes trainer and engine two different policies, and nothing corrects "
                "for it; set algorithm.correction.level: token, or model.dtype: float32"
            )
    kl = algorithm.kl
    if kl.coef > 0 and kl.base == "behaviour" and staleness == 0:
        raise ValueError(
            "algorithm.kl.base: behaviour has no effect with loop.max_staleness: 0: the policy that is stepped is the "
            "behaviour policy, where the penalty and its gradient are 0"
        )


def routes_are_recorded(config: RunConfig) -> None:
    if config.model.routing_replay and not config.engine.prefix_caching:
        raise ValueError(
            "model.routing_replay: vLLM keeps recorded routes by KV block, which it names for prefix caching alone; set "
            "engine.prefix_caching: true, or model.routing_replay: false"
        )


def clips_that_act(config: RunConfig) -> None:
    """With one step a batch (``optimizer.steps_per_batch``) the policy is still the one that was recomputed for it."""
    algorithm = config.algorithm
    for option in ("clip_low", "clip_high", "dual_clip"):
        changed = getattr(algorithm, option) != type(algorithm).model_fields[option].default
        if changed and algorithm.proximal == "current" and algorithm.loss in LOSSES:
            raise ValueError(
                f"algorithm.{option} has no effect with algorithm.proximal: current: at the only step of a batch every "
                "ratio is 1; remove it, or set algorithm.proximal: rollout and algorithm.correction: off"
            )


def filters_that_keep_something(config: RunConfig) -> None:
    if config.rollout.drop_zero_variance and config.rollout.samples_per_prompt == 1:
        raise ValueError(
            "rollout.drop_zero_variance drops every group of one sample; set rollout.samples_per_prompt to 2 or more, or "
            "drop_zero_variance: false"
        )
    advantage = config.algorithm.advantage
    other = advantage in ESTIMATORS and advantage not in GROUP_ESTIMATORS
    if config.rollout.drop_zero_variance and other:
        raise ValueError(
            f"rollout.drop_zero_variance drops groups of equal rewards, which algorithm.advantage: {advantage} learns from; "
            "set it to false"
        )


def a_schedule_that_begins(config: RunConfig) -> None:
    optimizer, steps = config.optimizer, config.loop.steps
    if optimizer.schedule != "constant" and optimizer.warmup_steps >= steps:
        raise ValueError(
            f"optimizer.schedule: {optimizer.schedule} never begins: optimizer.warmup_steps is {optimizer.warmup_steps} of "
            f"loop.steps {steps}; set it to less"
        )


def what_the_estimator_needs(config: RunConfig) -> None:
    advantage, samples = config.algorithm.advantage, config.rollout.samples_per_prompt
    if advantage in GROUP_ESTIMATORS and samples < 2:
        raise ValueError(
            f"algorithm.advantage: {advantage} compares samples of a prompt; set rollout.samples_per_prompt to 2 or more"
        )
    if advantage == "gae" and config.critic is None:
        raise ValueError("algorithm.advantage: gae needs a critic; add a section critic, e.g. {}")
    if advantage in BUILT_IN_WITHOUT_CRITIC and config.critic is not None:
        raise ValueError(
            f"critic is not read by algorithm.advantage: {advantage}; remove it, or set advantage: gae"
        )


def a_critic_that_is_trained_as_it_says(config: RunConfig) -> None:
    critic = config.critic
    if critic is None:
        return
    if critic.placement == "colocated" and config.trainer.backend != "fsdp2":
        raise ValueError(
            f"critic.placement: colocated needs trainer.backend: fsdp2, by which a critic is trained, not "
            f"{config.trainer.backend}; set placement: separate"
        )
    if critic.clip is not None and critic.steps_per_batch == 1:
        raise ValueError(
            "critic.clip has no effect with critic.steps_per_batch: 1: no value has moved before the only step; "
            "remove it, or take more steps"
        )
    if critic.warmup_steps >= config.loop.steps:
        raise ValueError(
            f"critic.warmup_steps {critic.warmup_steps} leaves the policy none of loop.steps {config.loop.steps}"
        )


CHECKS = (
    best_is_measured,
    correction_where_off_policy,
    routes_are_recorded,
    clips_that_act,
    filters_that_keep_something,
    a_schedule_that_begins,
    what_the_estimator_needs,
    a_critic_that_is_trained_as_it_says,
)
"""In the order in which they are made; the first that fails is told."""
