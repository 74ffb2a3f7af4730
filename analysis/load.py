"""Run folders in, frozen records and pandas frames out. The only module that knows how a run lies on disk.

A run counts as finished where ``done.json`` exists and in no other case. Runs that were planned and are absent, or have
no ``done.json``, or whose files cannot be read, are lost, with the best reason the folder gives. A step recorded by two
attempts counts once, as the later attempt saw it. A value that is no finite number is refused and named: it never enters a
mean.

    experiment = load_experiment("runs/moe_vl/tiny")
    experiment.finished("molt")[0].metrics["reward_mean"]
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.plan import ExclusionRules, Plan

FINISHED, LOST, NOT_STARTED, AT_WORK = "finished", "lost", "not started", "at work"
FRESH_S = 900.0
"""Seconds since its last sign of life in which a run without an end may still be at work."""
TEXT_FIELDS = ("phase", "_fingerprint")
"""How the names of the records' fields end that hold text; all others hold numbers, or counts by reason."""
LARGEST = 1e100
"""No quantity of a run is larger, and the square of one that is would be no number any more."""
SECTIONS = (
    "config",
    "config.loop",
    "config.engine",
    "config.trainer",
    "config.probe",
    "conformance",
    "fingerprints",
)
"""Keys of run.json that hold an object where they are there."""


class LoadError(ValueError):
    """A run folder that breaks the record's contract; the message names file, line and key."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at a run as the job recorded it; times are Unix seconds, ``ended`` None while it works or was killed."""

    number: int
    host: str
    started: float
    ended: float | None
    state: str
    packages: Mapping[str, str] = field(default_factory=dict)
    """Name -> version of what was installed, {} where it was not recorded."""
    plan: str | None = None
    """Digest of the plan that stood when it started, None where it was not recorded."""


@dataclass(frozen=True)
class RunRecord:
    """One run as it lies on disk.

    metrics: a frame indexed by ``step``, one row a step, NaN where a record lacks the field; dropped counts are summed
    over reasons into ``tokens_dropped`` and ``groups_dropped``. faults: what was refused while reading.
    repeated_steps: training steps that a later attempt recorded again.
    """

    folder: str
    system: str
    seed: int
    identity: str
    state: str
    reason: str
    run: Mapping[str, Any]
    metrics: pd.DataFrame
    faults: tuple[str, ...] = ()
    attempts: int = 0
    repeated_steps: int = 0
    planned: bool = True
    spans: tuple[Attempt, ...] = ()

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved configuration, {} where the run never started."""
        return self.run.get("config", {})

    @property
    def training(self) -> pd.DataFrame:
        """The rows in which a batch was consumed (an initial evaluation at step 0 is none)."""
        return self.metrics.loc[self.metrics.index > 0]


@dataclass(frozen=True)
class Experiment:
    """A frozen plan and what became of its runs; ``beyond`` are folders that the plan does not name.

    ``runs`` are the replicates. controls (learning rate zero) and repeats (a system and seed once more) are the noise
    floor: they are shown beside the differences and enter none.
    """

    folder: Path
    plan: Plan
    runs: tuple[RunRecord, ...]
    beyond: tuple[RunRecord, ...] = field(default=())
    controls: tuple[RunRecord, ...] = field(default=())
    repeats: tuple[RunRecord, ...] = field(default=())

    def of(self, system: str) -> tuple[RunRecord, ...]:
        """The planned runs of an arm, by seed."""
        runs = [run for run in self.runs if run.system == system]
        return tuple(sorted(runs, key=lambda run: (run.seed, run.folder)))

    def pending(self, system: str) -> tuple[RunRecord, ...]:
        """The planned runs of an arm that have not ended: their results may still come."""
        return tuple(run for run in self.of(system) if run.state in (NOT_STARTED, AT_WORK))

    def finished(self, system: str) -> tuple[RunRecord, ...]:
        return tuple(run for run in self.of(system) if run.state == FINISHED)


def load_experiment(folder: str | Path) -> Experiment:
    """Read ``runs/<experiment>/<scale>``; a run that cannot be read is lost. Raises PlanError without a plan."""
    folder = Path(folder)
    plan = Plan.load(folder / "plan.json")
    runs: dict[str, list[RunRecord]] = {"replicate": [], "control": [], "repeat": []}
    for name, run in plan.identities.items():
        planned = {"system": run.system, "seed": run.seed, "identity": run.identity}
        runs[run.purpose].append(_load_or_lose(folder / name, planned))
    systems = {arm.name for arm in plan.arms}
    beyond = []
    for path in sorted(folder.glob("*/run.json")):
        if path.parent.name in plan.identities:
            continue
        found = _load_or_lose(path.parent, {})
        if found.system in systems and found.run.get("kind", "train") == "train":
            beyond.append(found)
    return Experiment(
        folder,
        plan,
        tuple(runs["replicate"]),
        tuple(beyond),
        controls=tuple(runs["control"]),
        repeats=tuple(runs["repeat"]),
    )


def _load_or_lose(folder: Path, planned: Mapping[str, Any]) -> RunRecord:
    """The run, or, where its files break the contract, a lost one whose reason says which and how."""
    try:
        return load_run(folder, **planned, planned=bool(planned))
    except LoadError as error:
        return RunRecord(
            folder=folder.name,
            system=planned.get("system") or re.sub(r"-s\d+-\w+$", "", folder.name),
            seed=planned.get("seed", 0),
            identity=planned.get("identity", ""),
            state=LOST,
            reason=f"cannot be read: {error}",
            run={},
            metrics=_no_records(),
            planned=bool(planned),
        )


def load_run(
    folder: str | Path,
    *,
    system: str | None = None,
    seed: int | None = None,
    identity: str | None = None,
    planned: bool = True,
) -> RunRecord:
    """Read one run folder; system, seed and identity are what the plan says, and must be what the run says.

    Raises LoadError that names file and key.
    """
    folder = Path(folder)
    path = folder / "run.json"
    facts = _read_json(path) if path.is_file() else {}
    expected = {"system": system, "seed": seed, "identity": identity}
    for key, value in expected.items():
        if facts and key not in facts:
            raise LoadError(f"{path}: key {key} is missing")
        if facts and value is not None and facts[key] != value:
            raise LoadError(
                f"{path}: {key} is {facts[key]!r}, the plan names {value!r} for this folder"
            )
    _require_sections(path, facts)
    metrics, faults = read_metrics(folder / "metrics.jsonl")
    faults += _changed_since(folder)
    entries = [entry for entry in folder.glob("attempts/*") if entry.name.isdecimal()]
    attempts = sorted((entry for entry in entries if entry.is_dir()), key=lambda e: int(e.name))
    state, reason = _state(folder, attempts)
    return RunRecord(
        folder=folder.name,
        system=facts.get("system", system),
        seed=facts.get("seed", seed),
        identity=facts.get("identity", identity),
        state=state,
        reason=reason,
        run=facts,
        metrics=metrics,
        faults=faults,
        attempts=len(attempts),
        repeated_steps=metrics.attrs.get("repeated_steps", 0),
        planned=planned,
        spans=tuple(_spans(attempts)),
    )


def read_metrics(path: Path) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """``metrics.jsonl`` as a frame by step, and the refused values by name.

    ``frame.attrs["repeated_steps"]`` counts the training steps that several attempts recorded.
    Raises LoadError on a line that is no JSON object with a step, except an unfinished last line: a killed writer
    leaves one.
    """
    if not path.is_file():
        return _no_records(), ()
    by_step: dict[int, dict[str, Any]] = {}
    repeated: set[int] = set()
    lines = _read_text(path).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError):
                break
            raise LoadError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise LoadError(f"{path}:{number}: a record needs an integer step")
        if type(record.get("attempt", 1)) is not int:
            raise LoadError(f"{path}:{number}: attempt is {record['attempt']!r}, not an integer")
        earlier = by_step.get(record["step"])
        if (
            earlier is not None
            and record["step"] > 0
            and record.get("attempt", 1) != earlier.get("attempt", 1)
        ):
            repeated.add(record["step"])
        if earlier is None or record.get("attempt", 1) >= earlier.get("attempt", 1):
            by_step[record["step"]] = record
    faults: list[str] = []
    rows = []
    for step in sorted(by_step):
        row = {}
        for name, value in by_step[step].items():
            if isinstance(value, dict) and all(map(_is_number, value.values())):
                value = sum(value.values())
            if value is None or _is_number(value) or _is_text(name, value):
                row[name] = math.nan if value is None else value
            else:
                shown = (
                    repr(value)[:40] if isinstance(value, (str, list, dict)) else f"{value}"[:40]
                )
                faults.append(f"{path.parent.name}: {name} is {shown} at step {step}")
        rows.append(row)
    if not rows:
        return _no_records(), ()
    frame = pd.DataFrame(rows).set_index("step")
    frame.attrs["repeated_steps"] = len(repeated)
    return frame, tuple(faults)


def _no_records() -> pd.DataFrame:
    return pd.DataFrame(index=pd.Index([], name="step", dtype=int))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -LARGEST < value < LARGEST


def _is_text(name: str, value: Any) -> bool:
    return isinstance(value, str) and name.endswith(TEXT_FIELDS)


def steady(run: RunRecord, rules: ExclusionRules) -> pd.DataFrame:
    """The steps that a rate counts: without warm-up, the steps after a resume, and what else the plan leaves out."""
    rows = run.training
    keep = pd.Series(True, index=rows.index)
    keep.iloc[: rules.warmup_steps] = False
    if "attempt" in rows:
        attempt = rows["attempt"]
        for first in rows.index[(attempt != attempt.shift()) & attempt.shift().notna()]:
            position = rows.index.get_loc(first)
            keep.iloc[position : position + rules.after_resume_steps] = False
    for column, excluded in (
        ("t_eval_s", rules.exclude_evaluation),
        ("t_checkpoint_s", rules.exclude_checkpoint),
    ):
        if excluded and column in rows:
            keep &= ~(rows[column] > 0)
    return rows[keep]


def _changed_since(folder: Path) -> tuple[str, ...]:
    """A fault where a finished run's metrics.jsonl is not the file whose digest done.json holds."""
    done, metrics = folder / "done.json", folder / "metrics.jsonl"
    expected = _read_json(done).get("metrics_sha256") if done.is_file() else None
    if expected is None or not metrics.is_file():
        return ()
    same = hashlib.sha256(metrics.read_bytes()).hexdigest() == expected
    return () if same else (f"{folder.name}: metrics.jsonl changed after the run was done",)


def _spans(attempts: list[Path]) -> Iterator[Attempt]:
    """Attempts with the time of their start; one that records none (an external system) has no place in a timeline."""
    for path in attempts:
        if not (path / "start.json").is_file():
            continue
        start = _read_json(path / "start.json")
        end = _read_json(path / "end.json") if (path / "end.json").is_file() else {}
        if not _is_number(start.get("time")):
            continue
        host = start.get("slurm_job_nodelist") or start.get("host", "unknown host")
        packages = start.get("packages")
        yield Attempt(
            int(path.name),
            str(host),
            float(start["time"]),
            float(end["ended"]) if _is_number(end.get("ended")) else None,
            str(end.get("state", "no end recorded")),
            packages if isinstance(packages, dict) else {},
            start.get("plan"),
        )


def _require_sections(path: Path, facts: Mapping[str, Any]) -> None:
    """Raises LoadError where a key that holds an object holds something else."""
    for key in SECTIONS:
        value: Any = facts
        for part in key.split("."):
            value = value.get(part, {})
        if not isinstance(value, dict):
            raise LoadError(f"{path}: key {key} is {json.dumps(value)[:40]}, an object is expected")


def _state(folder: Path, attempts: list[Path]) -> tuple[str, str]:
    """(state, reason); the reason is what the last attempt wrote, or where the heart stopped."""
    if (folder / "done.json").is_file():
        return FINISHED, ""
    if not attempts:
        return NOT_STARTED, "planned, never started"
    end = attempts[-1] / "end.json"
    if end.is_file():
        return LOST, str(_read_json(end).get("reason", "ended without a reason"))
    heartbeat = folder / "heartbeat.json"
    signs = [path.stat().st_mtime for path in (heartbeat, attempts[-1]) if path.exists()]
    state = AT_WORK if time.time() - max(signs) < FRESH_S else LOST
    if heartbeat.is_file():
        beat = _read_json(heartbeat)
        return state, (
            f"no done.json; last sign of life in phase {beat.get('phase', '?')} at step {beat.get('step', '?')}"
        )
    return state, "no done.json and no heartbeat"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise LoadError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: a JSON object is expected")
    return value
