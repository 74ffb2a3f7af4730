"""One short run of each arm before the rest is released:  python -m harness.submit FILE --canary

A canary is its arm's first replicate cut to a few steps, an evaluation and a checkpoint included: it shows soon what would
have failed in each of a hundred runs. It is a run of its own (``canary-<arm>-<hash>``), no replicate, and no analysis reads it.
The others need it: a canary that fails keeps them from starting.
"""

from __future__ import annotations

from dataclasses import replace

from harness.expand import Expansion, Run
from harness.identity import digest
from molt_core.config import RunConfig

STEPS = 3


def with_canaries(expansion: Expansion) -> Expansion:
    """The same experiment with a canary of each arm, which all training runs wait for."""
    canaries = [_canary(run) for run in _firsts(expansion)]
    names = tuple(run.name for run in canaries)
    before = [run for run in expansion.runs if run.kind != "train"]
    after = [replace(run, needs=(*run.needs, *names)) for run in expansion.trained]
    return replace(expansion, runs=(*before, *canaries, *after))


def _firsts(expansion: Expansion) -> list[Run]:
    firsts: dict[str, Run] = {}
    for run in expansion.replicates:
        firsts.setdefault(run.system, run)
    return list(firsts.values())


def _canary(run: Run) -> Run:
    steps = min(STEPS, run.config.loop.steps)
    saves_after = max(1, steps - 1)  # the last step leaves the policy and no checkpoint
    critic, optimizer = run.config.critic, run.config.optimizer
    if critic is not None:
        warmup = min(critic.warmup_steps, steps - 1)
        critic = critic.model_copy(update={"warmup_steps": warmup})
    config = run.config.model_copy(
        update={
            "critic": critic,
            "optimizer": optimizer.model_copy(
                update={"warmup_steps": min(optimizer.warmup_steps, steps - 1)}
            ),
            "loop": run.config.loop.model_copy(update={"steps": steps}),
            "evaluation": run.config.evaluation.model_copy(update={"every": steps}),
            "checkpoint": run.config.checkpoint.model_copy(
                update={"every_steps": saves_after, "keep_best": None}
            ),
        }
    )
    identity = digest(["canary", run.identity, steps])
    name = f"canary-{run.system}-{identity[:8]}"
    return replace(
        run,
        name=name,
        kind="canary",
        system="canary",
        role="canary",
        identity=identity,
        config=RunConfig.model_validate(config.model_dump()),
    )
