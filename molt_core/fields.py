"""The fields of a step's record (``metrics.jsonl``) and when each is recorded: one list for all who name a field.

``checkpoint.keep_best`` and an experiment's endpoints are held against it before a run starts. Units and meanings are in the
table of ``molt_core/README.md``; tests hold that table equal to this list, and what a run records to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from molt_core.config import RunConfig

FIELDS: Mapping[str, str] = {
    name: when
    for when, names in {
        "every step": (
            "step attempt phase time_unix optimizer_steps stepped wall_s t_wait_s t_forward_backward_s "
            "t_optimizer_s t_refit_s t_probe_s t_overlap_s refit_bytes devices policy_version lag_mean lag_max "
            "lag_histogram prompts_fingerprint trained_fingerprint tokens_generated tokens_trained "
            "tokens_in_flight tokens_dropped groups_generated groups_trained groups_in_flight groups_dropped "
            "kept_fraction tokens_evaluation tokens_probe tokens_batch tokens_kept tokens_forward "
            "tokens_across_refit trained_tokens_max segments_mean context_tokens_mean context_tokens_max "
            "groups_zero_variance loss grad_norm grad_clipped memory_peak_bytes entropy kl importance_ratio "
            "importance_weight effective_sample_fraction"
        ),
        "with a critic": "t_critic_s value_loss critic_grad_norm explained_variance",
        "with evaluation": "t_eval_s eval_reward_mean eval_reward_stderr eval_items eval_failed eval_tokens",
        "with a checkpoint": "t_checkpoint_s",
        "every step that stepped": "update_ratio",
        "with a reference": "kl_reference",
        "with `kl.target`": "kl_coef",
        "`mode: truncate`": "importance_truncated",
        "`mode: clip`": "importance_clipped",
        "`mode: mask`": "importance_masked",
        "where the loss clips": "clip_fraction",
        "`clipped`, `gspo`": "clip_fraction_low",
        "with `dual_clip`": "dual_clip_fraction",
        "with `critic.clip`": "value_clip_fraction",
        "rollouts arrived": "reward_mean reward_std response_tokens_mean truncated_fraction rollouts",
        "with routers": "expert_load_max",
        "with recorded routes": "router_disagreement",
        "with a probe": "mismatch_tokens mismatch_mean mismatch_p99 mismatch_max tokens_router_tied",
    }.items()
    for name in names.split()
}
"""Name -> when, in the words of that table."""
TEXTS = frozenset(("phase", "prompts_fingerprint", "trained_fingerprint"))
TABLES = frozenset(("lag_histogram", "tokens_dropped", "groups_dropped"))
NUMBERS = frozenset(FIELDS) - TEXTS - TABLES
OF_LOSSES = frozenset(("clip_fraction", "clip_fraction_low", "dual_clip_fraction"))
"""What a loss returns beside its numbers; all other names are taken."""

_EVERY: Mapping[str, Callable[[RunConfig], int | None]] = {
    "with a critic": lambda config: _if(config.critic is not None),
    "with `critic.clip`": lambda config: _if(config.critic is not None and config.critic.clip),
    "with evaluation": lambda config: config.evaluation.every,
    "with a probe": lambda config: config.probe.every,
    "with a checkpoint": lambda config: config.checkpoint.every_steps,
    "with a reference": lambda config: _if("reference" in config.algorithm.frozen_policies),
    "with `kl.target`": lambda config: _if(config.algorithm.kl.target),
    "with `dual_clip`": lambda config: _if(config.algorithm.dual_clip),
    "where the loss clips": lambda config: _if(config.algorithm.loss != "policy_gradient"),
    "`clipped`, `gspo`": lambda config: _if(
        config.algorithm.loss not in ("policy_gradient", "cispo")
    ),
    "`mode: truncate`": lambda config: _corrects(config, "truncate"),
    "`mode: clip`": lambda config: _corrects(config, "clip"),
    "`mode: mask`": lambda config: _corrects(config, "mask"),
    "with recorded routes": lambda config: _if(config.model.routing_replay),
}


def steps_between(name: str, config: RunConfig) -> int | None:
    """Steps from one record of the field ``name`` to the next; None where ``config`` never has it recorded.

    1 also where it depends on what a step meets (no rollout arrived, nothing stepped on).
    """
    every = _EVERY.get(FIELDS[name])
    return 1 if every is None else every(config)


def _if(holds: object) -> int | None:
    return 1 if holds else None


def _corrects(config: RunConfig, mode: str) -> int | None:
    correction = config.algorithm.correction
    return _if(correction.level != "off" and correction.mode == mode)
