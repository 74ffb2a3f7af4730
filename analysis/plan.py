"""The plan of an experiment, frozen before its first run: what is measured, against which margin, on which runs.

A margin chosen after seeing the data proves nothing, so ``freeze`` writes ``plan.json`` once, at the first submit. The
same plan later is a no-op; a different one is kept as an amendment that says what changed and which runs were done by
then, and the report shows it.

    plan = Plan(experiment="moe_vl", endpoints=[...], ...)
    plan = freeze(plan, "runs/moe_vl/tiny/plan.json")
    plan = Plan.load("runs/moe_vl/tiny/plan.json")
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from analysis.endpoint import Endpoint, Strict

SCHEMA_VERSION = 1
MOST_ALPHA = 0.05
"""A plan may ask for more certainty, never for less."""
LATE_SHARE = 0.2
"""Of alpha, for all looks after the first together."""


class PlanError(ValueError):
    """A plan that cannot be read or honoured; the message names the file and the key."""


class Arm(Strict):
    """A system under comparison. Differences read "arm minus baseline"."""

    name: str
    role: Literal["baseline", "candidate"]


class ExclusionRules(Strict):
    """Which steps a rate leaves out, fixed in advance and equal for every arm."""

    warmup_steps: int = Field(5, ge=0, description="first steps of a run")
    after_resume_steps: int = Field(2, ge=0, description="first steps of every later attempt")
    exclude_evaluation: bool = Field(False, description="steps that evaluated")
    exclude_checkpoint: bool = Field(False, description="steps that wrote a checkpoint")


class LostRunRule(Strict):
    """When lost runs refuse a comparison: a mean over survivors flatters the arm that lost its worst."""

    max_lost: int = Field(1, ge=0, description="most runs an arm may lose")
    fisher_p: float = Field(0.2, ge=0, le=1, description="uneven loss below this p refuses")


class ValidityBounds(Strict):
    """The bounds of the validity checks, declared with the plan so that no run can move them."""

    mismatch_p99: float = Field(1e-5, gt=0, description="nats, 99th percentile of the probe")
    mismatch_max: float = Field(1e-3, gt=0, description="nats, maximum of the probe")
    mismatch_tokens: int = Field(256, gt=0, description="least tokens of a probe")
    tied_share: float = Field(
        1e-3, gt=0, description="largest share of tokens left out for a router tie"
    )
    mismatch_growth: float = Field(
        10.0, gt=1, description="fold by which the probe's p99 may grow over a run, from its slope"
    )
    updated_share: float = Field(
        0.5, gt=0, le=1, description="least share of steps with a gradient"
    )
    kept_fraction: float = Field(0.5, gt=0, le=1, description="least mean share of samples kept")
    waiting_share: float = Field(0.3, gt=0, le=1, description="above it a step time is insensitive")


class PlannedRun(Strict):
    """What a run folder is for: a replicate of an arm, or part of the noise floor, which enters no comparison."""

    system: str
    seed: int
    identity: str
    purpose: Literal["replicate", "control", "repeat"] = Field(
        "replicate",
        description="control: learning rate zero; repeat: the same system and seed once more",
    )


class Amendment(Strict):
    """A change of the plan after it was frozen. ``diff`` maps a dotted key to [before, after].

    runs_done: the runs whose records existed by then, finished or not. before_digest: that of the plan that stood until
    then; None for a plan that was written when runs had records already.
    """

    time: datetime
    diff: dict[str, tuple[Any, Any]]
    runs_done: tuple[str, ...]
    before_digest: str | None = None


class Plan(Strict):
    """Everything that must be decided before the first number is seen."""

    schema_version: int = SCHEMA_VERSION
    experiment: str
    question: str
    scale: str
    endpoints: tuple[Endpoint, ...]
    arms: tuple[Arm, ...]
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    exclusion: ExclusionRules = ExclusionRules()
    lost_run_rule: LostRunRule = LostRunRule()
    validity: ValidityBounds = ValidityBounds()
    alpha: float = Field(MOST_ALPHA, gt=0, le=MOST_ALPHA)
    pairing_unit: Literal["seed"] | None = Field(
        None,
        description="seed: learning endpoints pair by seed, times by the seed's block in time; "
        "none: independent runs, Welch's test",
    )
    switch: str | None = Field(
        None, description="the one key of the protocol in which the arms differ, by declaration"
    )
    identities: dict[str, PlannedRun] = Field(
        default_factory=dict, description="run folder name -> what it is for"
    )
    order: tuple[str, ...] = Field((), description="run folder names in the order submitted")
    created: datetime = Field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))
    amendments: tuple[Amendment, ...] = ()

    @model_validator(mode="after")
    def _complete(self) -> Plan:
        _require_unique("endpoints", [endpoint.name for endpoint in self.endpoints])
        _require_unique("arms", [arm.name for arm in self.arms])
        _require_unique("seeds", list(self.seeds))
        if not 1 <= len(self.primaries) <= 2:
            raise ValueError(
                f"endpoints: one or two must be primary: true, {len(self.primaries)} are; the others are exploratory"
            )
        if sum(arm.role == "baseline" for arm in self.arms) != 1 or len(self.arms) < 2:
            raise ValueError(
                "arms: exactly one needs role: baseline, and at least one role: candidate"
            )
        names = {arm.name for arm in self.arms}
        for folder, run in self.identities.items():
            stray = run.purpose == "replicate" and run.seed not in self.seeds
            if run.system not in names or stray:
                raise ValueError(
                    f"identities.{folder}: system {run.system}, seed {run.seed} is not in arms x seeds"
                )
        planned = [
            f"{run.system} with seed {run.seed}"
            for run in self.identities.values()
            if run.purpose == "replicate"
        ]
        _require_unique("identities", planned)
        return self

    @property
    def primaries(self) -> tuple[Endpoint, ...]:
        return tuple(endpoint for endpoint in self.endpoints if endpoint.primary)

    @property
    def baseline(self) -> str:
        return next(arm.name for arm in self.arms if arm.role == "baseline")

    @property
    def candidates(self) -> tuple[str, ...]:
        return tuple(arm.name for arm in self.arms if arm.role == "candidate")

    @property
    def has_control(self) -> bool:
        """True where a learning-rate-zero control is planned, without which no equality of learning can be claimed."""
        return any(run.purpose == "control" for run in self.identities.values())

    @property
    def seeds_added_late(self) -> tuple[int, ...]:
        """Seeds that were not in the plan when the first results existed."""
        late = [a.diff["seeds"] for a in self.amendments if a.runs_done and "seeds" in a.diff]
        return tuple(seed for seed in self.seeds if any(seed not in before for before, _ in late))

    @property
    def late(self) -> tuple[Amendment, ...]:
        """The amendments that were made when runs had records."""
        return tuple(amendment for amendment in self.amendments if amendment.runs_done)

    @property
    def removed_late(self) -> dict[str, str]:
        """Folder -> arm of the replicates that had records when they left the plan, and whose arm and seed did not return."""
        there = {(run.system, run.seed) for run in self.identities.values()}
        gone = {}
        for amendment in self.late:
            for key, (before, after) in amendment.diff.items():
                folder = _run_of(key)
                if folder not in amendment.runs_done or not isinstance(before, dict) or after:
                    continue
                replicate = before.get("purpose", "replicate") == "replicate"
                if replicate and (before["system"], before["seed"]) not in there:
                    gone[folder] = before["system"]
        return gone

    @property
    def primaries_ever(self) -> tuple[str, ...]:
        """Names of the endpoints that were primary while runs had records: Holm's family does not shrink afterwards."""
        names = [endpoint.name for endpoint in self.primaries]
        for amendment in self.late:
            for key, (before, _) in amendment.diff.items():
                section, _, rest = key.partition(".")
                if section == "endpoints" and isinstance(before, dict) and before.get("primary"):
                    names.append(rest)
                if section == "endpoints" and rest.endswith(".primary") and before is True:
                    names.append(rest.removesuffix(".primary"))
        return tuple(dict.fromkeys(names))

    @property
    def digest(self) -> str:
        """Hash of what the plan promises. Every attempt notes it when it starts, so that an edit of the file shows."""
        # Without defaults, so that a key which a later version adds leaves the hash of an older plan as it was.
        promised = self.model_dump(
            mode="json", exclude={"created", "amendments"}, exclude_defaults=True
        )
        return hashlib.sha256(json.dumps(promised, sort_keys=True).encode()).hexdigest()

    @property
    def digests(self) -> frozenset[str]:
        """Those of the plans that stood, from the first to this one."""
        earlier = {a.before_digest for a in self.amendments if a.before_digest is not None}
        return frozenset({self.digest, *earlier})

    @property
    def looks(self) -> int:
        """How often the runs could be looked at with the choice to go on.

        One, and one for each late change of the seeds or replacement of runs that had records.
        """
        return 1 + sum(_chooses_again(amendment) for amendment in self.amendments)

    @property
    def alpha_per_look(self) -> float:
        """The level of the latest look: seeds added after seeing results do not buy a verdict.

        The first look has spent alpha before anybody knew of a second, so all later ones share LATE_SHARE of it: half of
        that for the second, a quarter for the third. However many follow, some look is false in at most 1.2 alpha.
        """
        if self.looks == 1:
            return self.alpha
        return self.alpha * LATE_SHARE * 2.0 ** (1 - self.looks)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a frozen plan. Raises PlanError that names the file where it is absent or not a plan."""
        path = Path(path)
        if not path.is_file():
            raise PlanError(f"{path}: no frozen plan; `python -m harness.submit` writes it")
        try:
            plan = cls.model_validate_json(path.read_text())
        except ValueError as error:
            raise PlanError(f"{path}: not a plan: {error}") from error
        if plan.schema_version != SCHEMA_VERSION:
            raise PlanError(
                f"{path}: schema_version {plan.schema_version}, this code reads {SCHEMA_VERSION}"
            )
        return plan

    def content(self) -> dict[str, Any]:
        """What the plan promises: all of it but when it was written and how it was amended."""
        return self.model_dump(mode="json", exclude={"created", "amendments"})


def freeze(plan: Plan, path: str | Path) -> Plan:
    """Write ``plan`` at the first submit; later keep the frozen one, with an amendment where the new one differs.

    Returns the plan that now stands. The folder of ``path`` holds the run folders; the runs with records are
    named in the amendment, those of an earlier amendment too. A first plan that comes after records is itself an amendment.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        known = tuple(
            sorted(
                f.parent.name for f in path.parent.glob("*/metrics.jsonl") if _is_training(f.parent)
            )
        )
        if known:
            plan = _amended(plan, {"plan": (None, "written when runs had records")}, known, None)
        draft = _write_beside(plan, path)
        try:
            os.link(draft, path)  # unlike a rename, fails where another submit was first
            return plan
        except FileExistsError:
            pass  # that plan stands: compare with it below
        finally:
            draft.unlink()
    frozen = Plan.load(path)
    diff = _differences(frozen.content(), plan.content())
    if not diff:
        return frozen
    named = {
        *frozen.identities,
        *(_run_of(key) for amendment in frozen.amendments for key in amendment.diff),
    } - {None}
    done = sorted(name for name in named if (path.parent / name / "metrics.jsonl").exists())
    plan = plan.model_copy(update={"created": frozen.created, "amendments": frozen.amendments})
    amended = _amended(plan, diff, tuple(done), frozen.digest)
    os.replace(_write_beside(amended, path), path)
    return amended


def _amended(
    plan: Plan, diff: dict[str, tuple[Any, Any]], runs_done: tuple[str, ...], before: str | None
) -> Plan:
    now = datetime.now(UTC).replace(microsecond=0)
    amendment = Amendment(time=now, diff=diff, runs_done=runs_done, before_digest=before)
    return plan.model_copy(update={"amendments": (*plan.amendments, amendment)})


def _is_training(folder: Path) -> bool:
    """Whether a run folder holds what an endpoint could be read from; the warm-up does not."""
    about = folder / "run.json"
    return not about.is_file() or json.loads(about.read_text()).get("kind", "train") == "train"


def _run_of(key: str) -> str | None:
    """The run folder that a diff's key is about, None for any other key."""
    section, _, rest = key.partition(".")
    return rest.partition(".")[0] if section == "identities" and rest else None


def _chooses_again(amendment: Amendment) -> bool:
    """True where runs were added or replaced with results in sight."""
    replaced = {
        _run_of(key)
        for key, (before, _) in amendment.diff.items()
        if not isinstance(before, dict) or before.get("purpose", "replicate") == "replicate"
    } & set(amendment.runs_done)
    return bool(amendment.runs_done) and ("seeds" in amendment.diff or bool(replaced))


def _write_beside(plan: Plan, path: Path) -> Path:
    """A complete temporary file in the same folder, so that a reader never sees half a plan."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        json.dump(plan.model_dump(mode="json"), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(name, 0o644)
    return Path(name)


def _differences(before: Any, after: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (before, after) of every leaf that differs; None where a side lacks it."""
    if before == after:
        return {}
    if isinstance(before, list) and isinstance(after, list) and _named(before) and _named(after):
        before, after = ({item["name"]: item for item in side} for side in (before, after))
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return {key: (before, after)}
    diff: dict[str, tuple[Any, Any]] = {}
    for name in [*before, *(name for name in after if name not in before)]:
        diff |= _differences(before.get(name), after.get(name), f"{key}.{name}" if key else name)
    return diff


def _named(items: list[Any]) -> bool:
    """True for a list of objects with a name, which is compared by name and not by position."""
    return bool(items) and all(isinstance(item, dict) and "name" in item for item in items)


def _require_unique(key: str, values: list[Any]) -> None:
    repeated = sorted({str(value) for value in values if values.count(value) > 1})
    if repeated:
        raise ValueError(f"{key}: {', '.join(repeated)} appears more than once")
