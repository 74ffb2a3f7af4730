"""What the algorithm costs beside the model:  OMP_NUM_THREADS=1 python -m tests.bench.algorithms [SAMPLES [ANSWER_TOKENS]]

On the demo's batch (16 prompts x 8 samples, one image a prompt), one rank, one thread, float32: the time of every estimator
(from the batch's tokens to a checked advantage and a weight each) and of every loss (from log-probabilities to a scalar,
correction and metrics included), each as a share of the policy's forward pass, in CPU time and in an order drawn anew each
round. Apart from them stands what is the same whatever the algorithm is, the books: groups laid flat into tokens, and the
result cut into rollouts again, which the ranks share. The shares are the result; the times belong to the machine. A real
policy's shares are smaller: the algorithm sees a few numbers a token whatever the size of the model, and its cost a rollout is
spread over longer answers (ANSWER_TOKENS; the demo's have 4).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from molt_core.algo.advantages import RolloutTokens, advantages, rollout_tokens
from molt_core.algo.aggregation import AGGREGATIONS, WeightedRollout, weighted_rollouts
from molt_core.algo.config import GROUP_ESTIMATORS, AlgorithmConfig, KLConfig
from molt_core.models.load import load_policy
from molt_core.models.tiny import build_tiny_qwen3_vl_moe
from molt_core.train.collate import collate
from molt_core.train.logprobs import ActionDistribution
from molt_core.train.objective import weighted_loss
from molt_core.train.policy import ActionPolicy
from molt_core.types import Batch, Group, Rollout
from tests.bench.train_step import PROMPTS, SAMPLES_EACH, demo_rows

CRITIC_FREE = (*GROUP_ESTIMATORS, "reinforce_pp", "flash_reinforce")
ESTIMATORS = {name: AlgorithmConfig(advantage=name) for name in CRITIC_FREE} | {
    "on_policy_distillation": AlgorithmConfig(advantage="on_policy_distillation", teacher="-")
}
LOSSES = {
    "clipped, tis": AlgorithmConfig(),
    "clipped, dual clip": AlgorithmConfig(dual_clip=3.0),
    "gspo, sequence_masked_tis": AlgorithmConfig(loss="gspo", correction="sequence_masked_tis"),
    "cispo, icepop": AlgorithmConfig(loss="cispo", correction="icepop"),
    "policy_gradient, binary_kl": AlgorithmConfig(loss="policy_gradient", correction="binary_kl"),
    "clipped, reference, entropy": AlgorithmConfig(kl=KLConfig(coef=0.1), entropy_coef=0.01),
}


WITH_BOOKS = "grpo, laid flat and cut again"


def demo_batch(checkpoint: Path, actions: int) -> Batch:
    """The demo's rows as groups, rewarded by chance."""
    rng, rows = np.random.default_rng(0), demo_rows(checkpoint, actions)
    groups = []
    for prompt in range(PROMPTS):
        members = rows[prompt * SAMPLES_EACH : (prompt + 1) * SAMPLES_EACH]
        rollouts = tuple(
            Rollout(f"{prompt}/{n}", (row,), float(rng.integers(2)))
            for n, row in enumerate(members)
        )
        groups.append(Group(f"p{prompt}", prompt, rollouts, 0, 0))
    return Batch(tuple(groups), 0)


def weighed(tokens: RolloutTokens, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """What an estimator has to say of a batch: advantages and weights, ``[N]`` each."""
    return advantages(tokens, config), AGGREGATIONS[config.aggregation](tokens, config)


def interleaved(work: dict[str, Callable[[], object]], samples: int) -> dict[str, float]:
    """Median seconds of CPU time of each, in random order round by round, after three rounds to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    rng, names = np.random.default_rng(0), list(work)
    for number in range(samples + 3):
        for name in rng.permutation(names):
            started = time.process_time()
            work[name]()
            if number >= 3:
                seconds[name].append(time.process_time() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def main(samples: int, actions: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = build_tiny_qwen3_vl_moe(Path(folder) / "tiny")
        policy = ActionPolicy(load_policy(checkpoint).train())
        batch = demo_batch(checkpoint, actions)
    count = batch.action_tokens
    frozen = {"reference": np.full(count, -5.0, np.float32)}
    rollouts: list[WeightedRollout] = weighted_rollouts(batch, AlgorithmConfig(), frozen)
    rows = [segment for rollout in rollouts for segment in rollout.segments]
    collated = collate(rows, [rollout.advantages for rollout in rollouts])
    distribution = ActionDistribution(1.0, torch.tensor([], dtype=torch.long))

    def forward():
        return policy(collated, distribution)

    logprobs, entropy = (values.detach() for values in forward())
    logprobs.requires_grad_()
    tokens = rollout_tokens(batch, dict.fromkeys(("teacher", "policy"), frozen["reference"]))
    work: dict[str, Callable[[], object]] = {"forward pass": forward}
    for name, config in ESTIMATORS.items():
        work[name] = lambda c=config: weighed(tokens, c)
    work[WITH_BOOKS] = lambda: weighted_rollouts(batch, ESTIMATORS["grpo"])
    for name, config in LOSSES.items():
        work[name] = lambda c=config: weighted_loss(rollouts, collated, logprobs, entropy, c)
    medians = interleaved(work, samples)
    table = Table("what", "median ms", "share of the forward pass")
    for name, seconds in medians.items():
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{seconds / medians['forward pass']:.2%}")
    Console().print(table)
    default, loss = medians["grpo"], medians["clipped, tis"]
    both = {
        "default estimator and loss": default + loss,
        "dearest estimator and loss": max(medians[name] for name in ESTIMATORS)
        + max(medians[name] for name in LOSSES),
        "the books of a batch": medians[WITH_BOOKS] - default,
    }
    for name, seconds in both.items():
        print(f"{name}: {seconds / medians['forward pass']:.2%}")
    print(f"{len(rows)} rows, {collated.tokens_forward} tokens, {count} of them sampled")


if __name__ == "__main__":
    samples, actions, *_ = [int(argument) for argument in sys.argv[1:]] + [20, 4][
        len(sys.argv) - 1 :
    ]
    main(samples, actions)
