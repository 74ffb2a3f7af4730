"""The report as plain data: report.json. Its schema is in analysis/README.md; the page, Markdown and LaTeX are views of it.

Estimate and interval of an INVALID endpoint are withheld; each run's own value stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from analysis import wording
from analysis.checks import Check
from analysis.endpoint import Endpoint
from analysis.inference import Verdict
from analysis.load import FINISHED, NOT_STARTED, Experiment, RunRecord
from analysis.lost import SuccessRate, fisher_p
from analysis.matching import leaves, protocol
from analysis.noise import noise_floor, partings
from analysis.robustness import Omission
from analysis.verdict import EndpointResult

SCHEMA_VERSION = 1


def report_data(experiment: Experiment, results: Sequence[EndpointResult]) -> dict[str, Any]:
    """Plan, accounting, endpoints with verdicts, checks, noise floor, protocol."""
    plan = experiment.plan
    checks = {
        (result.measurement.candidate, check.name): check
        for result in results
        for check in result.measurement.checks
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "experiment": plan.experiment,
        "scale": plan.scale,
        "question": plan.question,
        "baseline": plan.baseline,
        "generated": datetime.now(UTC).isoformat(timespec="seconds"),
        "alpha": plan.alpha_per_look,
        "looks": plan.looks,
        "pairing_unit": plan.pairing_unit,
        "seeds": list(plan.seeds),
        "seeds_added_late": list(plan.seeds_added_late),
        "arms": [_arm(experiment, arm.name, arm.role) for arm in plan.arms],
        "losses": [_loss(experiment, name) for name in plan.candidates],
        "endpoints": [_endpoint(experiment, result) for result in results],
        "checks": [_check(candidate, check) for (candidate, _), check in checks.items()],
        "noise_floor": [_floor(experiment, endpoint) for endpoint in plan.endpoints],
        "partings": [asdict(parting) for parting in partings(experiment)],
        "protocol": _shared_protocol(experiment),
        "differences": _arm_settings(experiment),
        "runs": [_run(run, purpose) for purpose, run in _all_runs(experiment)],
        "plan": {
            "created": plan.created.isoformat(),
            "exclusion": plan.exclusion.model_dump(),
            "lost_run_rule": plan.lost_run_rule.model_dump(),
            "amendments": [amendment.model_dump(mode="json") for amendment in plan.amendments],
        },
    }


def _arm(experiment: Experiment, name: str, role: str) -> dict[str, Any]:
    runs = experiment.of(name)
    finished = sum(run.state == FINISHED for run in runs)
    low, high = SuccessRate(finished, len(runs)).interval
    return {
        "name": name,
        "role": role,
        "planned": len(runs),
        "started": sum(run.state != NOT_STARTED for run in runs),
        "finished": finished,
        "lost": len(runs) - finished,
        "success_rate": finished / len(runs) if runs else None,
        "success_low": low,
        "success_high": high,
        "retried": sum(run.attempts > 1 for run in runs),
        "forced": sum(bool(run.run.get("forced")) for run in runs),
        "beyond_plan": sum(run.system == name for run in experiment.beyond),
        "lost_runs": [
            {"seed": run.seed, "folder": run.folder, "reason": run.reason}
            for run in runs
            if run.state != FINISHED
        ],
    }


def _loss(experiment: Experiment, candidate: str) -> dict[str, Any]:
    """Fisher's test of uneven loss between a candidate and the baseline."""
    names = (candidate, experiment.plan.baseline)
    rates = [SuccessRate(len(experiment.finished(n)), len(experiment.of(n))) for n in names]
    return {"candidate": candidate, "baseline": names[1], "p_fisher": fisher_p(rates)}


def _endpoint(experiment: Experiment, result: EndpointResult) -> dict[str, Any]:
    endpoint, decision, measured = result.endpoint, result.decision, result.measurement
    invalid = decision.verdict == Verdict.INVALID
    c = None if result.comparison is None or invalid else result.comparison
    race = None if invalid else measured.race
    needed = decision.needed
    return {
        "name": endpoint.name,
        "primary": endpoint.primary,
        "kind": endpoint.kind,
        "unit": endpoint.unit,
        "direction": endpoint.direction,
        "measured_as": _measured_as(endpoint),
        "scale": endpoint.scale,
        "margin": endpoint.margin,
        "margin_text": wording.margin(endpoint),
        "margin_reason": endpoint.margin_reason,
        "condition": endpoint.condition,
        "candidate": measured.candidate,
        "baseline": measured.baseline,
        "n": c.n if c else len(measured.values[measured.candidate]),
        "n_baseline": c.n_baseline if c else len(measured.values[measured.baseline]),
        "mean": c and c.mean,
        "mean_baseline": c and c.mean_baseline,
        "sd": c and c.sd,
        "sd_baseline": c and c.sd_baseline,
        "estimate": c and c.estimate,
        "ci_low": c and c.ci_low,
        "ci_high": c and c.ci_high,
        "level": 1 - experiment.plan.alpha_per_look,
        "tost_low": c and c.tost_low,
        "tost_high": c and c.tost_high,
        "estimate_text": wording.effect(endpoint, c.estimate) if c else "\u2013",
        "ci_text": wording.interval(endpoint, c.ci_low, c.ci_high) if c else "\u2013",
        "test": c and c.test,
        "correlation": c and c.correlation,
        "p_difference": c and c.p_difference,
        "p_difference_holm": result.p_holm if c or race else None,
        "p_equivalence": c and c.p_equivalence,
        "p_non_inferiority": c and c.p_non_inferiority if endpoint.non_inferiority else None,
        "p_permutation": c and c.p_permutation,
        "df": c and c.df,
        "verdict": decision.verdict.value,
        "headline": decision.headline,
        "detail": decision.detail,
        "reasons": list(decision.reasons),
        "cautions": list(result.cautions),
        "needed_n": needed and [needed.low, needed.high],
        "needed_n_estimate": needed and needed.estimate,
        "may_write": result.may_write,
        "may_not_write": result.may_not_write,
        "item_stderr": _item_stderr(experiment, result),
        "censored": race and asdict(race),
        "worst_case": asdict(measured.worst_case) if c and measured.worst_case else None,
        "leave_one_out": [_omission(endpoint, omission) for omission in result.omissions],
        "values": {arm: {str(s): v for s, v in by.items()} for arm, by in measured.values.items()},
    }


def _omission(endpoint: Endpoint, omission: Omission) -> dict[str, Any]:
    c = omission.comparison
    return {
        "arm": omission.arm,
        "seed": omission.seed,
        "estimate": c and c.estimate,
        "ci_low": c and c.ci_low,
        "ci_high": c and c.ci_high,
        "estimate_text": wording.effect(endpoint, c.estimate) if c else "\u2013",
        "ci_text": wording.interval(endpoint, c.ci_low, c.ci_high) if c else "\u2013",
        "verdict": omission.verdict and omission.verdict.value,
    }


def _floor(experiment: Experiment, endpoint: Endpoint) -> dict[str, Any]:
    floor = noise_floor(experiment, endpoint)
    return {
        "name": endpoint.name,
        "unit": endpoint.unit,
        "control": list(floor.control),
        "control_mean": floor.control_mean,
        "repeats": {arm: list(values) for arm, values in floor.repeats.items()},
        "same_seed_sd": floor.same_seed_sd,
    }


def _item_stderr(experiment: Experiment, result: EndpointResult) -> float | None:
    """Mean standard error over the items of one evaluation, where the records hold it; None for other endpoints."""
    field = result.endpoint.field
    if not isinstance(field, str) or result.endpoint.summary != "at_last_step":
        return None
    name = f"{field.removesuffix('_mean')}_stderr"
    runs = [run for arm in result.measurement.values for run in experiment.finished(arm)]
    recorded = [run.metrics[name].dropna() for run in runs if name in run.metrics]
    errors = [series.iloc[-1] for series in recorded if len(series)]
    return float(sum(errors) / len(errors)) if errors else None


def _measured_as(endpoint: Endpoint) -> str:
    texts = {
        "at_last_step": "at the last step",
        "final_window_mean": f"mean of the last {endpoint.window} records",
        "total_rate": "total over total, steady steps",
        "auc": "mean height of the curve",
        "steps_to_threshold": f"first recorded step at {endpoint.threshold} or above",
        "seconds_to_threshold": f"wall time of the steps up to {endpoint.threshold} or above",
    }
    return f"{endpoint.field}, {texts[endpoint.summary]}"


def _check(candidate: str, check: Check) -> dict[str, Any]:
    record = asdict(check) | {"candidate": candidate, "status": _status(check)}
    record["endpoints"] = list(check.endpoints)
    return record


def _status(check: Check) -> str:
    """passed, failed, flagged (shown only) or unverified."""
    if check.passed is None:
        return "unverified"
    if check.passed:
        return "passed"
    return "flagged" if check.effect == "flag" else "failed"


def _all_runs(experiment: Experiment) -> Iterator[tuple[str, RunRecord]]:
    yield from (("replicate", run) for run in experiment.runs)
    yield from (("control", run) for run in experiment.controls)
    yield from (("repeat", run) for run in experiment.repeats)
    yield from (("beyond the plan", run) for run in experiment.beyond)


def _run(run: RunRecord, purpose: str) -> dict[str, Any]:
    times = run.metrics["time_unix"] if "time_unix" in run.metrics else None
    return {
        "folder": run.folder,
        "system": run.system,
        "seed": run.seed,
        "purpose": purpose,
        "planned": run.planned,
        "state": run.state,
        "reason": run.reason,
        "attempts": run.attempts,
        "last_step": None if run.metrics.empty else int(run.metrics.index[-1]),
        "minutes": None if times is None else round(float(times.max() - times.min()) / 60, 1),
        "hosts": sorted({span.host for span in run.spans}),
    }


def _shared_protocol(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """Section -> key -> value, of the leaves that every started run shares."""
    configs = [protocol(run.config) for run in experiment.runs if run.config]
    sections: dict[str, dict[str, Any]] = {}
    for key, value in (configs[0] if configs else {}).items():
        if all(key in other and other[key] == value for other in configs):
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name or section] = value
    return sections


def _arm_settings(experiment: Experiment) -> list[dict[str, Any]]:
    """What the arms do not share: one row a key, one value an arm (several where its runs disagree)."""
    rows: dict[str, dict[str, list[Any]]] = {}
    names = [arm.name for arm in experiment.plan.arms]
    for run in experiment.runs:
        own = {key: value for key, value in run.config.items() if key != "seed"}
        for key, value in leaves(own):
            seen = rows.setdefault(key, {}).setdefault(run.system, [])
            if value not in seen:
                seen.append(value)
    return [
        {"key": key, "values": {name: seen.get(name, []) for name in names}}
        for key, seen in rows.items()
        if len({json.dumps(seen.get(name), sort_keys=True) for name in names}) > 1
        or any(len(values) > 1 for values in seen.values())
    ]
