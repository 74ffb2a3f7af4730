"""Run folders with plausible figures and known truths, for tests and for looking at the report without a day of runs.

python -m tests.analysis.synthetic /tmp/runs      writes /tmp/runs/moe_vl/tiny
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.endpoint import Endpoint, Rate
from analysis.plan import Arm, Plan, PlannedRun, freeze

ACCURACY = Endpoint(
    name="held-out accuracy",
    field="eval_reward_mean",
    summary="at_last_step",
    unit="accuracy",
    direction="higher",
    margin=0.03,
    margin_reason="3 points of accuracy is the least that would change which trainer one picks",
    scale="absolute",
    primary=True,
    ceiling=1.0,
)
TRAINER_TIME = Endpoint(
    name="trainer time per token",
    field=Rate(
        numerator=("t_forward_backward_s", "t_optimizer_s"), denominator=("tokens_forward",)
    ),
    summary="total_rate",
    unit="s/token",
    direction="lower",
    margin=0.1,
    margin_reason="a tenth is what one loses to an unlucky node",
    scale="ratio",
    primary=True,
)
STEP_TIME = Endpoint(
    name="step time",
    field=Rate(numerator=("wall_s",), denominator=("steps",)),
    summary="total_rate",
    unit="s/step",
    direction="lower",
    margin=0.1,
    margin_reason="a tenth is what one loses to an unlucky node",
    scale="ratio",
)

CONFIG: dict[str, Any] = {
    "model": {
        "builtin": "tiny-qwen3-vl-moe",
        "builtin_seed": 0,
        "dtype": "float32",
        "max_length": 128,
    },
    "task": {
        "source": "shapes",
        "agent": "single_turn",
        "variant": {"ask": "colour"},
        "eval_items": 256,
    },
    "rollout": {"groups_per_step": 8, "samples_per_prompt": 8, "sampling": {"temperature": 1.0}},
    "algorithm": {"advantage": "grpo", "loss": "clipped", "clip_low": 0.2, "clip_high": 0.28},
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "clip_norm": 1.0},
    "loop": {"steps": 60, "schedule": "free", "max_staleness": 1},
    "evaluation": {"every": 10, "temperature": 0.0},
    "probe": {"every": 1, "tokens": 256},
    "engine": {"count": 1, "device": "cpu"},
}


INITIAL = 0.42
"""Accuracy of the initial checkpoint."""

CONFORMANCE = {
    "passed": True,
    "logprob_difference": 3.1e-6,
    "loss_difference": 7e-8,
    "grad_norm_difference": 6e-7,
    "update_difference": 3e-5,
}


@dataclass(frozen=True)
class Truth:
    """What an arm is really like: mean and run SD of its final accuracy, seconds per step and their run SD (log)."""

    role: str = "candidate"
    accuracy: float = 0.88
    accuracy_sd: float = 0.012
    step_s: float = 1.5
    step_log_sd: float = 0.03
    wait_share: float = 0.2
    trainer: Mapping[str, Any] = field(
        default_factory=lambda: {"backend": "fsdp2", "world_size": 1}
    )


MOLT = Truth()
MEGATRON = Truth(
    role="baseline",
    step_s=1.8,
    trainer={"backend": "harness.baselines.megatron_core:MegatronBackend", "world_size": 1},
)

EditRun = Callable[[str, int, dict[str, Any]], None]
EditRecord = Callable[[str, int, dict[str, Any]], None]


def write_experiment(
    root: Path,
    *,
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
    steps: int = 60,
    arms: Mapping[str, Truth] | None = None,
    endpoints: tuple[Endpoint, ...] = (ACCURACY, TRAINER_TIME, STEP_TIME),
    lost: Mapping[tuple[str, int], str] | None = None,
    absent: tuple[tuple[str, int], ...] = (),
    edit_run: EditRun | None = None,
    edit_record: EditRecord | None = None,
    hosts: Callable[[str, int], str] = lambda system, seed: f"node-{seed % 2}",
    controls: int = 1,
    repeats: int = 0,
    pairing_unit: str | None = None,
    random_seed: int = 7,
) -> Path:
    """Write ``root/moe_vl/tiny`` with a frozen plan and its runs; returns that folder.

    controls: runs of the baseline with learning rate zero. repeats: further runs of each arm with the first seed.
    lost: (system, seed) -> reason, for runs that died half-way. edit_run and edit_record change run.json and each record
    in place: planted faults. hosts: (system, seed) -> the node of a run.
    """
    arms = arms or {"molt": MOLT, "megatron": MEGATRON}
    folder = root / "moe_vl" / "tiny"
    random = np.random.default_rng(random_seed)
    identities = {
        f"{name}-s{seed}-{identity(name, seed)[:8]}": PlannedRun(
            system=name, seed=seed, identity=identity(name, seed)
        )
        for seed in seeds
        for name in arms
    }
    identities |= _noise_floor(arms, seeds[0], controls, repeats)
    plan = Plan(
        experiment="moe_vl",
        question="Does an FSDP2 trainer learn as well as Megatron-Core from the same rollouts, and as fast?",
        scale="tiny",
        endpoints=endpoints,
        arms=tuple(Arm(name=name, role=truth.role) for name, truth in arms.items()),
        seeds=seeds,
        identities=identities,
        order=tuple(identities),
        pairing_unit=pairing_unit,
    )
    plan = freeze(plan, folder / "plan.json")
    start = 1.79e9
    for name, run in identities.items():
        key = (run.system, run.seed)
        truth = arms[run.system]
        if run.purpose == "control":
            truth = replace(truth, accuracy=INITIAL, accuracy_sd=0.01)
        records = simulate(truth, run.seed, steps, start, random)
        start = records[-1]["time_unix"] + 20
        if key in absent:
            continue
        facts = run_facts(run, truth, steps)
        if run.purpose == "control":
            facts["config"]["optimizer"]["lr"] = 0.0
        if edit_run:
            edit_run(run.system, run.seed, facts)
        reason = (lost or {}).get(key)
        for record in records:
            if edit_record:
                edit_record(run.system, run.seed, record)
        kept = records[: steps // 2] if reason else records
        host = hosts(run.system, run.seed)
        write_run(folder / name, facts, kept, reason, host=host, plan=plan.digest)
    return folder


def _noise_floor(
    arms: Mapping[str, Truth], seed: int, controls: int, repeats: int
) -> dict[str, PlannedRun]:
    baseline = next(name for name, truth in arms.items() if truth.role == "baseline")
    runs = {
        f"{baseline}-control-s{number}": PlannedRun(
            system=baseline,
            seed=number,
            identity=identity(f"control {baseline}", number),
            purpose="control",
        )
        for number in range(controls)
    }
    for name in arms:
        for number in range(1, repeats + 1):
            runs[f"{name}-repeat{number}-s{seed}"] = PlannedRun(
                system=name,
                seed=seed,
                identity=identity(f"repeat {number} {name}", seed),
                purpose="repeat",
            )
    return runs


def identity(system: str, seed: int) -> str:
    return hashlib.sha256(f"{system} {seed}".encode()).hexdigest()


def run_facts(run: PlannedRun, truth: Truth, steps: int) -> dict[str, Any]:
    config = json.loads(json.dumps(CONFIG))
    config["loop"]["steps"] = steps
    return {
        "identity": run.identity,
        "experiment": "moe_vl",
        "scale": "tiny",
        "system": run.system,
        "seed": run.seed,
        "role": truth.role,
        "config": {**config, "trainer": dict(truth.trainer), "seed": run.seed},
        "fingerprints": {
            "code": "c0de" * 8,
            "packages": "9ac4" * 8,
            "hardware": {"cpu": "x86-64, 2 cores"},
        },
        "warmup_content_hash": "a11ce" * 8,
        "conformance": {"passed": True, "pairs": {"conformance-molt": CONFORMANCE}},
    }


def simulate(
    truth: Truth, seed: int, steps: int, start: float, random: np.random.Generator
) -> list[dict[str, Any]]:
    """The records of one run: step 0 is the evaluation of the initial checkpoint."""
    final = random.normal(truth.accuracy, truth.accuracy_sd)
    pace = truth.step_s * math.exp(random.normal(0, truth.step_log_sd))
    initial, clock = INITIAL, start
    records: list[dict[str, Any]] = [
        {
            "step": 0,
            "attempt": 1,
            "phase": "evaluate",
            "time_unix": clock,
            "eval_reward_mean": initial,
        }
    ]
    for step in range(1, steps + 1):
        progress = (1 - math.exp(-5 * step / steps)) / (1 - math.exp(-5))
        level = initial + (final - initial) * progress
        evaluates = step % 10 == 0 or step == steps
        slow = 4.0 if step == 1 else 1.0
        work = pace * (1 - truth.wait_share) * slow * random.uniform(0.97, 1.03)
        parts = {
            "t_wait_s": pace * truth.wait_share * random.uniform(0.6, 1.4),
            "t_forward_backward_s": 0.68 * work,
            "t_optimizer_s": 0.17 * work,
            "t_refit_s": 0.15 * work,
            "t_eval_s": 0.6 if evaluates else 0.0,
            "t_checkpoint_s": 0.0,
        }
        wall = sum(parts.values()) * 1.02
        clock += wall
        mismatch = random.lognormal(math.log(1.5e-6), 0.25)
        record = {
            "step": step,
            "attempt": 1,
            "phase": "train",
            "time_unix": clock,
            "optimizer_steps": step,
            "wall_s": wall,
            **parts,
            "t_overlap_s": 0.6 * work,
            "devices": 2,
            "policy_version": step,
            "lag_mean": random.uniform(0.4, 0.6),
            "lag_max": 1,
            "tokens_generated": 200 * step + 200,
            "tokens_trained": 200 * step,
            "tokens_in_flight": 200,
            "tokens_dropped": {},
            "groups_generated": 8 * step + 8,
            "groups_trained": 8 * step,
            "groups_in_flight": 8,
            "groups_dropped": {},
            "tokens_forward": 3200,
            "tokens_across_refit": 40,
            "prompts_fingerprint": f"prompts-{seed}-{step}",
            "kept_fraction": 1.0,
            "mismatch_mean": mismatch / 4,
            "mismatch_p99": mismatch,
            "mismatch_max": 4 * mismatch,
            "mismatch_tokens": 260,
            "tokens_router_tied": 0,
            "grad_norm": random.lognormal(-0.5, 0.3),
            "loss": random.normal(0, 0.02),
            "entropy": 1.2 * (1 - 0.8 * progress),
            "reward_mean": float(np.clip(level - 0.04 + random.normal(0, 0.05), 0, 1)),
            "reward_std": 0.4,
            "response_tokens_mean": 3.1,
            "truncated_fraction": 0.0,
        }
        if evaluates:
            score = final if step == steps else level + random.normal(0, 0.01)
            record["eval_reward_mean"] = score
            record["eval_reward_stderr"] = math.sqrt(max(0.0, score * (1 - score)) / 256)
        records.append(record)
    return records


def write_run(
    folder: Path,
    facts: Mapping[str, Any],
    records: list[dict[str, Any]],
    reason: str | None,
    host: str,
    plan: str,
) -> None:
    attempt = folder / "attempts" / "01"
    attempt.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "heartbeat.json").write_text(json.dumps({"phase": "train", "step": len(records) - 1}))
    times = [record["time_unix"] for record in records]
    (attempt / "start.json").write_text(
        json.dumps({"time": times[0] - 8, "host": host, "plan": plan})
    )
    end = {"reason": reason or "finished", "state": "FAILED" if reason else "DONE"}
    (attempt / "end.json").write_text(json.dumps({**end, "ended": times[-1] + 2}))
    if reason is None:
        (folder / "done.json").write_text(json.dumps({"step": records[-1]["step"]}))


if __name__ == "__main__":
    print(
        write_experiment(
            Path(sys.argv[1]),
            lost={("molt", 3): "out of memory in backward, step 31"},
            steps=150,
            controls=2,
            repeats=2,
        )
    )
