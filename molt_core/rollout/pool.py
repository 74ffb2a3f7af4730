"""The streaming pool: which prompts are in flight, which groups wait for the trainer, which ones a batch takes.

Pure bookkeeping without processes, so that its promises can be tested by themselves:

- *Lag is bounded.* While the policy has version v at most ``(v + max_staleness + 1) * groups_per_step`` groups have been
  dispatched (dropped ones not counted), and a batch is formed only if the groups it leaves behind can still be trained
  before they grow too old; otherwise it waits for them.
- *Nothing is lost silently.* Every dispatched group is trained, dropped under a reason, or in flight; tokens likewise.
- *Order.* Among finished groups the earliest dispatched go first. Under lockstep a batch is exactly the next kept
  groups in dispatch order, and nothing is dispatched before the pool has run empty.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from molt_core.config import LoopConfig, RolloutConfig
from molt_core.types import Batch, ContractError, Group


class BooksError(RuntimeError):
    """Tokens or groups that are neither trained nor dropped nor in flight: the run must not go on."""


@dataclass
class Books:
    """Cumulative counts of one unit: action tokens, or groups."""

    generated: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def check(self, in_flight: int, unit: str) -> None:
        """Raise BooksError unless generated = trained + dropped + in flight."""
        accounted = self.trained + sum(self.dropped.values()) + in_flight
        if accounted != self.generated:
            raise BooksError(
                f"{unit}: {self.generated} generated, but {self.trained} trained + {dict(self.dropped)} dropped + "
                f"{in_flight} in flight = {accounted}"
            )


class Pool:
    def __init__(
        self, rollout: RolloutConfig, loop: LoopConfig, prompt_id: Callable[[int], str]
    ) -> None:
        """``prompt_id(index)`` names the prompt at a place of the dispatch order."""
        self.size = rollout.groups_per_step
        self.drop_zero_variance = rollout.drop_zero_variance
        self.loop = loop
        self.version = 0
        self.running: dict[int, int] = {}
        """Dispatch index -> version at dispatch, of groups being generated."""
        self.finished: dict[int, Group] = {}
        """Whole groups that wait for the trainer, by dispatch index."""
        self.dispatched = 0
        self.tokens, self.groups = Books(), Books()
        self._again: list[int] = []
        """Groups that were being generated when the run was saved: running, and to be started again."""
        self._prompt_id = prompt_id
        self._dispatch_hash, self._hashed = hashlib.sha256(), 0
        self._trained_hash = 0

    @property
    def lockstep(self) -> bool:
        return self.loop.schedule == "lockstep"

    def dispatch(self) -> list[int]:
        """Indices to start now. The caller starts each of them and reports it with ``finish``."""
        if self.lockstep and len(self.running) > len(self._again):
            return []
        wanted = min(self.version + self.loop.max_staleness + 1, self.loop.steps) * self.size
        count = max(0, wanted - (self.dispatched - sum(self.groups.dropped.values())))
        indices = list(range(self.dispatched, self.dispatched + count))
        again, self._again = self._again, []
        self.running.update(dict.fromkeys([*again, *indices], self.version))
        self.dispatched += count
        self.groups.generated += count
        return [*again, *indices]

    def finish(self, group: Group) -> str | None:
        """Take in a generated group; returns the reason where it is dropped."""
        if group.prompt_id != self._prompt_id(group.index):
            raise ContractError(
                f"group {group.index} is of prompt {group.prompt_id}, dispatched was {self._prompt_id(group.index)}"
            )
        del self.running[group.index]
        self.tokens.generated += group.tokens_generated
        reason = self._reason_to_drop(group)
        if reason:
            self.groups.dropped[reason] += 1
            self.tokens.dropped[reason] += group.tokens_generated
        else:
            self.finished[group.index] = group
        return reason

    def _reason_to_drop(self, group: Group) -> str | None:
        lost = [rollout.status for rollout in group.rollouts if rollout.status != "ok"]
        if lost:
            return lost[0]
        if self.drop_zero_variance and (group.rewards == group.rewards[0]).all():
            return "zero_variance"
        return None

    def take(self) -> Batch | None:
        """The next batch, once it may be formed; None while groups that it needs are still being generated."""
        if len(self.finished) < self.size:
            return None
        chosen = sorted(self.finished)[: self.size]
        if self.lockstep:
            if any(index < chosen[-1] for index in self.running):
                return None
        elif not self._leaves_room(chosen):
            return None
        return Batch(tuple(self.finished[index] for index in chosen), self.version)

    def _leaves_room(self, chosen: list[int]) -> bool:
        """Whether every group left can still be trained in time if ``chosen`` go now.

        A group's deadline is the version at its dispatch plus ``max_staleness``. Of the groups that are left, those due by
        version u must fit into the batches up to u. By induction over versions and by the bound on dispatch, the earliest
        dispatched groups always satisfy this, so waiting for all of them always helps.
        """
        staleness = self.loop.max_staleness
        left = [*self.running.values()]
        left += [g.dispatched_version for index, g in self.finished.items() if index not in chosen]
        return all(
            sum(version + staleness <= due for version in left) <= (due - self.version) * self.size
            for due in range(self.version, self.version + staleness + 1)
        )

    def lags(self, batch: Batch) -> np.ndarray:
        """Version at training minus version at sampling, for each action token.

        Raises ContractError where the bound is broken, or where a token was sampled over a KV cache of older weights.
        """
        rows = [row for group in batch.groups for row in group.segments]
        lags = batch.version - np.concatenate([row.versions[row.action_mask] for row in rows])
        if lags.min() < 0 or lags.max() > self.loop.max_staleness:
            raise ContractError(
                f"lag {lags.min()}..{lags.max()} at version {batch.version} breaks max_staleness "
                f"{self.loop.max_staleness}"
            )
        if any(row.mixed[row.action_mask].any() for row in rows):
            raise ContractError(
                "a token sampled over an older KV cache has no exact version and no correction"
            )
        return lags

    def trained(self, batch: Batch, tokens: int) -> None:
        """The trainer has stepped on ``batch`` and counted ``tokens`` action tokens."""
        for group in batch.groups:
            del self.finished[group.index]
            digest = hashlib.sha256(f"{group.index}:{group.prompt_id}".encode()).digest()
            self._trained_hash = (self._trained_hash + int.from_bytes(digest[:8], "big")) % 2**64
        self.tokens.trained += tokens
        self.groups.trained += len(batch.groups)

    @property
    def tokens_in_flight(self) -> int:
        """Action tokens of finished groups that wait; a group still being generated is booked when it arrives."""
        return sum(group.action_tokens for group in self.finished.values())

    def check(self) -> None:
        self.tokens.check(self.tokens_in_flight, "action tokens")
        self.groups.check(len(self.running) + len(self.finished), "groups")

    def fingerprints(self, step: int) -> tuple[str, str]:
        """(hash of the first ``step * groups_per_step`` prompt ids in dispatch order, order-free hash of trained groups)."""
        return self._hash_prompts(step * self.size)[:16], f"{self._trained_hash:016x}"

    def _hash_prompts(self, count: int) -> str:
        while self._hashed < count:
            self._dispatch_hash.update(self._prompt_id(self._hashed).encode() + b"\n")
            self._hashed += 1
        return self._dispatch_hash.hexdigest()

    def state(self) -> dict[str, Any]:
        """What ``restore`` goes on from. A view of this moment: copy it before anything else happens."""
        return {
            "version": self.version,
            "running": sorted(self.running),
            "finished": self.finished,
            "dispatched": self.dispatched,
            "tokens": self.tokens,
            "groups": self.groups,
            "trained_hash": self._trained_hash,
            "prompts": (self._hashed, self._dispatch_hash.hexdigest()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state`` in a fresh pool. Groups that were being generated keep their place and are started again.

        Raises ContractError where the data are not those that the run was saved with.
        """
        count, expected = state["prompts"]
        names = {index: group.prompt_id for index, group in state["finished"].items()}
        if self._hash_prompts(count) != expected or any(
            self._prompt_id(index) != name for index, name in names.items()
        ):
            raise ContractError(
                "the checkpoint was written with other prompts, or another order of them, than task and seed give now"
            )
        self.version, self.dispatched = state["version"], state["dispatched"]
        self.tokens, self.groups = state["tokens"], state["groups"]
        self.finished, self._trained_hash = dict(state["finished"]), state["trained_hash"]
        self._again = list(state["running"])
        self.running = dict.fromkeys(self._again, self.version)
