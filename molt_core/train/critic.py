"""The critic: a value model beside the policy, in the trainer's processes or in as many of its own.

    values -> advantages and returns (``algo/advantages.py``) -> the critic's steps on the batch, and then the policy's

FSDP2 trains it whatever trains the policy, so that two trainers under comparison have one critic. Its loss is the sum over
sampled tokens of weight x value loss, with the policy's weights: like the policy's it does not depend on how a batch is split.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from molt_core.algo.aggregation import WeightedRollout
from molt_core.algo.losses import explained_variance, value_loss
from molt_core.train.collate import collate
from molt_core.train.objective import flat
from molt_core.train.ranks import Rank, RankGroup, added, memory_peak_bytes
from molt_core.train.split import shares
from molt_core.types import Trajectory

FOLDER = "critic"
"""In a checkpoint's trainer folder, wherever the critic was."""


@dataclass(frozen=True)
class CriticResult:
    """The critic's steps on one batch: means over these steps.

    ``sums`` over all action tokens of the batch: ``tokens``, ``value_loss`` (weighted: its sum is what is stepped on) and,
    where there is a clip, ``value_clip_fraction``. explained_variance: of the values before these steps, None where all
    returns are equal. memory_peak_bytes: of the rank with the most.
    """

    sums: Mapping[str, float]
    grad_norm: float
    memory_peak_bytes: int
    explained_variance: float | None = None

    @property
    def decisive(self) -> dict[str, float]:
        """What must be finite, by a name for messages."""
        return {"value loss": self.sums["value_loss"], "critic's gradient norm": self.grad_norm}


def weighted_value_loss(
    rollouts: Sequence[WeightedRollout], values: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch's part of the critic's objective, a scalar; and which of its N tokens lie beyond ``clip``, ``[N]`` bool.

    values ``[N]``: the critic's now, of the rollouts' sampled tokens.
    """
    old, returns, weights = (
        flat(rollouts, name).to(values.device) for name in ("values", "returns", "weights")
    )
    per_token, metrics = value_loss(values, old, returns, math.inf if clip is None else clip)
    return (per_token * weights).sum(), metrics["value_clip_fraction"]


class CriticRank(Rank):
    """One process that holds the critic; see ``Rank``."""

    def load_models(self) -> None:
        from molt_core.train.fsdp2 import FSDP2Critic  # 2 s of imports that the driver need not pay

        config, critic = self.config, self.config.critic
        self.critic = self.stepped[FOLDER] = FSDP2Critic(
            self.checkpoint if critic.path is None else Path(critic.path),
            # It routes as it would: what the engine recorded is the policy's routing.
            config.model.model_copy(update={"routing_replay": False}),
            config.optimizer.model_copy(update={"lr": critic.lr}),
            config.trainer.model_copy(update={"layout": {}}),
            config.loop.steps * critic.steps_per_batch,
        )

    @torch.no_grad()
    def values(self, micro_batches: Sequence[Sequence[Trajectory]]) -> dict[str, list[np.ndarray]]:
        """Under "values", of every row of the micro-batches in order: the values before its sampled tokens."""
        found = []
        for rows in micro_batches:
            values = self.critic.values(collate(rows)).cpu().numpy()
            found += np.split(values, np.cumsum([row.action_tokens for row in rows])[:-1])
        return {"values": found}

    def step_critic(self, micro_batches: Sequence[Sequence[WeightedRollout]]) -> CriticResult:
        """``critic.steps_per_batch`` steps, all towards the returns that the values before them gave."""
        critic, steps, norms = self.config.critic, [], []
        for _ in range(critic.steps_per_batch):
            sums = Counter(tokens=0, value_loss=0.0)
            for number, rollouts in enumerate(micro_batches):
                rows = [segment for rollout in rollouts for segment in rollout.segments]
                values = self.critic.values(collate(rows))
                loss, clipped = weighted_value_loss(rollouts, values, critic.clip)
                self.critic.backward(loss, is_last=number == len(micro_batches) - 1)
                sums["tokens"] += len(values)
                sums["value_loss"] += float(loss.detach())
                if critic.clip is not None:
                    sums["value_clip_fraction"] += float(clipped.sum())
            apply = self.worth_a_step(sums["value_loss"], sums["tokens"])
            norms.append(self.critic.optimizer_step(apply))
            steps.append(sums)
        return CriticResult(
            {name: total / len(steps) for name, total in added(steps).items()},
            float(np.mean(norms)),
            memory_peak_bytes(self.config.trainer.device),
        )


class CriticGroup(RankGroup):
    """The critic, wherever it is: its own ranks (``start``), or the trainer's."""

    kind = CriticRank

    async def values(self, rows: Sequence[Trajectory]) -> np.ndarray:
        """Values ``[N]`` before the rows' sampled tokens, in order."""
        return (await self.on_rows("values", rows))["values"]

    async def step(self, rollouts: Sequence[WeightedRollout]) -> CriticResult:
        split = shares(rollouts, self.data_size, self.config.trainer)
        results: list[CriticResult] = await self.on_shares("step_critic", split)
        return CriticResult(
            added(result.sums for result in self.of_shares(results)),
            results[0].grad_norm,
            max(result.memory_peak_bytes for result in results),
            explained_variance(flat(rollouts, "values"), flat(rollouts, "returns")),
        )
