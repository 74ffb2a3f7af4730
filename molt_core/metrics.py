"""The record of a run: ``metrics.jsonl`` (one object a step, the same fields for every backend) and ``heartbeat.json``.

A value that does not exist is absent, never 0. Seconds are wall clock; tokens are action tokens of training rollouts unless the
name says otherwise; a mean over rollouts weighs each rollout once, a mean over tokens each action token once.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from molt_core.algo.importance import effective_sample_fraction
from molt_core.rollout.pool import Pool
from molt_core.train.routing import routing_metrics
from molt_core.types import Batch, Group, Rollout

if TYPE_CHECKING:
    from molt_core.train.critic import CriticResult
    from molt_core.train.results import ProbeResult, StepResult


HEARTBEAT = "heartbeat.json"
POLICY = Path("checkpoints", "policy")
"""Where in a run's folder the trained policy goes."""


def attempts_made(run_dir: Path) -> int:
    """The number of the last attempt at a run, 0 before the first."""
    folders = (Path(run_dir) / "attempts").glob("[0-9]*")
    return max((int(f.name) for f in folders if f.name.isdecimal()), default=0)


def is_finished(run_dir: Path, steps: int) -> bool:
    """Whether a run has trained ``steps`` steps and left its policy."""
    heartbeat, policy = Path(run_dir) / HEARTBEAT, Path(run_dir) / POLICY
    if not (heartbeat.is_file() and (policy / "config.json").is_file()):
        return False
    beat = json.loads(heartbeat.read_text())
    return beat["phase"] == "finished" and beat["step"] >= steps


class RunWriter:
    """Appends records, line by line and flushed; replaces the heartbeat atomically."""

    def __init__(self, run_dir: Path, attempt: int, steps: int) -> None:
        self.run_dir, self.attempt, self.steps = Path(run_dir), attempt, steps
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.reward_mean: float | None = None
        self._drop_unfinished_line()

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def policy_folder(self) -> Path:
        """Where the trained policy goes."""
        return self.run_dir / POLICY

    @property
    def attempt_folder(self) -> Path:
        return self.run_dir / "attempts" / f"{self.attempt:02d}"

    def record(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Append a step's record, on disk when this returns. What a later attempt records of a step is what counts."""
        line = {"attempt": self.attempt, "time_unix": time.time(), **fields}
        self.reward_mean = line.get("reward_mean", self.reward_mean)
        with open(self._metrics, "a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(_summary(line, self.steps), flush=True)
        return line

    def resumed(self, step: int, fields: Mapping[str, Any]) -> None:
        """What this attempt went on from, and the probe of it."""
        self.attempt_folder.mkdir(parents=True, exist_ok=True)
        facts = {"step": step, "time_unix": time.time(), **fields}
        (self.attempt_folder / "resume.json").write_text(json.dumps(facts, indent=2) + "\n")
        print(f"goes on after step {step}/{self.steps}", flush=True)

    def placement(self, nodes: Mapping[str, Any]) -> None:
        """On which nodes this attempt's engines and trainer ranks lie."""
        self.attempt_folder.mkdir(parents=True, exist_ok=True)
        (self.attempt_folder / "placement.json").write_text(json.dumps(nodes, indent=2) + "\n")

    @property
    def _metrics(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    def _drop_unfinished_line(self) -> None:
        """A killed writer may leave half a line, which the next record must not be glued to."""
        if self._metrics.exists():
            whole = self._metrics.read_bytes()
            os.truncate(self._metrics, whole.rfind(b"\n") + 1)

    def dump(self, name: str, content: Any) -> Path:
        """Pickle ``content`` into this attempt's folder, for a person to look at; returns the file."""
        file = self.attempt_folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(content))
        return file

    def heartbeat(self, phase: str, step: int) -> None:
        beat = {
            "phase": phase,
            "step": step,
            "steps": self.steps,
            "time_unix": time.time(),
            "attempt": self.attempt,
        }
        if self.reward_mean is not None:
            beat["reward_mean"] = self.reward_mean
        temporary = self.run_dir / f"{HEARTBEAT}.tmp"
        temporary.write_text(json.dumps(beat))
        os.replace(temporary, self.run_dir / HEARTBEAT)


def _summary(line: Mapping[str, Any], steps: int) -> str:
    shown = (
        ("reward", "reward_mean"),
        ("eval", "eval_reward_mean"),
        ("loss", "loss"),
        ("grad", "grad_norm"),
        ("lag", "lag_mean"),
        ("mismatch", "mismatch_max"),
        ("step_s", "wall_s"),
    )
    parts = [f"{label} {line[name]:.3g}" for label, name in shown if name in line]
    return f"step {line['step']}/{steps}  " + "  ".join(parts)


def books(pool: Pool) -> dict[str, Any]:
    """Cumulative tokens and groups: generated = trained + dropped (by reason) + in flight."""
    return {
        "tokens_generated": pool.tokens.generated,
        "tokens_trained": pool.tokens.trained,
        "tokens_in_flight": pool.tokens_in_flight,
        "tokens_dropped": dict(pool.tokens.dropped),
        "groups_generated": pool.groups.generated,
        "groups_trained": pool.groups.trained,
        "groups_in_flight": len(pool.running) + len(pool.finished),
        "groups_dropped": dict(pool.groups.dropped),
        "kept_fraction": 1
        - sum(pool.groups.dropped.values()) / max(1, pool.groups.generated - len(pool.running)),
    }


def batch(batch: Batch) -> dict[str, float]:
    """Facts of the trained batch."""
    segments = [segment for group in batch.groups for segment in group.segments]
    contexts = [len(segment.token_ids) for segment in segments]
    return {
        "tokens_batch": batch.action_tokens,
        "trained_tokens_max": max(rollout.action_tokens for rollout in batch.rollouts),
        "segments_mean": len(segments) / len(batch.rollouts),
        "context_tokens_mean": float(np.mean(contexts)),
        "context_tokens_max": max(contexts),
        "tokens_across_refit": sum(segment.tokens_across_refit for segment in segments),
        "groups_zero_variance": sum(bool((g.rewards == g.rewards[0]).all()) for g in batch.groups),
    }


def lag(lags: np.ndarray) -> dict[str, Any]:
    """Versions between sampling and training, of each action token of the batch."""
    versions, counts = np.unique(lags, return_counts=True)
    return {
        "lag_mean": float(lags.mean()),
        "lag_max": int(lags.max()),
        "lag_histogram": {str(version): int(count) for version, count in zip(versions, counts)},
    }


def training(result: StepResult, clip_norm: float) -> dict[str, Any]:
    """Per-token means over the global batch, the gradient norm before clipping, and the loss that was stepped on."""
    sums = dict(result.sums)
    tokens = sums.pop("tokens")
    fields = {
        **routing_metrics(sums),
        "tokens_forward": int(sums.pop("tokens_forward")),
        "tokens_kept": int(sums.pop("tokens_kept")),
        "stepped": int(result.stepped),
        "loss": sums.pop("loss"),
        "grad_norm": result.grad_norm,
        "memory_peak_bytes": result.memory_peak_bytes,
        "grad_clipped": float(result.grad_norm > clip_norm),
        "effective_sample_fraction": effective_sample_fraction(
            sums["importance_weight"], sums.pop("importance_weight_squared"), int(tokens)
        ),
    }
    if result.update_ratio is not None:
        fields["update_ratio"] = result.update_ratio
    if result.critic is not None:
        fields |= {"t_critic_s": result.critic_s, **critic(result.critic)}
    return fields | {name: total / tokens for name, total in sums.items()}


def critic(result: CriticResult) -> dict[str, float]:
    """The critic's steps on one batch."""
    fields = {"value_loss": result.sums["value_loss"], "critic_grad_norm": result.grad_norm}
    if "value_clip_fraction" in result.sums:
        fields["value_clip_fraction"] = result.sums["value_clip_fraction"] / result.sums["tokens"]
    if result.explained_variance is not None:
        fields["explained_variance"] = result.explained_variance
    return fields


def probe(result: ProbeResult) -> dict[str, float]:
    """|trainer - engine| log-probability of the probe's tokens; those left out for a router tie are counted."""
    differences = result.differences.astype(np.float64)
    counts = {"mismatch_tokens": len(differences), "tokens_router_tied": result.tied}
    if not len(differences):
        return counts
    return counts | {
        "mismatch_mean": float(differences.mean()),
        "mismatch_p99": result.p99,
        "mismatch_max": float(differences.max()),
    }


def evaluation(rollouts: Sequence[Rollout], seconds: float) -> dict[str, float]:
    """Held-out items, one rollout each. A rollout that failed counts as reward 0 and is counted apart."""
    rewards = np.array([rollout.reward if rollout.status == "ok" else 0.0 for rollout in rollouts])
    spread = (
        {"eval_reward_stderr": float(rewards.std(ddof=1) / len(rewards) ** 0.5)}
        if len(rewards) > 1
        else {}
    )
    return spread | {
        "t_eval_s": seconds,
        "eval_reward_mean": float(rewards.mean()),
        "eval_items": len(rewards),
        "eval_failed": sum(rollout.status != "ok" for rollout in rollouts),
        "eval_tokens": sum(rollout.action_tokens for rollout in rollouts),
    }


def overlap_s(stretches: Sequence[tuple[float, float]], started: float, ended: float) -> float:
    """Seconds of [started, ended] during which some engine decoded."""
    inside = sorted(
        (max(a, started), min(b, ended)) for a, b in stretches if b > started and a < ended
    )
    total, reached = 0.0, started
    for a, b in inside:
        total += max(0.0, b - max(a, reached))
        reached = max(reached, b)
    return total


@dataclass
class RewardSums:
    """Rewards and lengths of the rollouts that arrived since the last step, before any filter."""

    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)

    def add(self, group: Group) -> None:
        for rollout in group.rollouts:
            if rollout.status == "ok":
                self.rewards.append(rollout.reward)
                self.lengths.append(rollout.action_tokens)
                self.truncated.append(rollout.truncated)

    def take(self) -> dict[str, float]:
        if not self.rewards:
            return {}
        rewards = np.sort(self.rewards)  # so that no last bit depends on the order of arrival
        fields = {
            "reward_mean": float(np.mean(rewards)),
            "response_tokens_mean": float(np.mean(self.lengths)),
            "truncated_fraction": float(np.mean(self.truncated)),
            "rollouts": len(self.rewards),
        }
        if len(rewards) > 1:
            fields["reward_std"] = float(np.std(rewards, ddof=1))
        self.__init__()
        return fields
