"""Is each run a training run? Its length, its gradient, its books, its lag, and the distribution it trained on.

checks = check_runs(Pair(experiment, "molt"))
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

from analysis.checks import Check, Finding, Pair, Problem, each_run, pair_check
from analysis.load import RunRecord
from analysis.lost import fisher_p, success_rates
from analysis.matching import MATCHING

LAG_GAP = 0.25
"""Versions by which the arms' mean lag may differ before it is flagged."""
WORK_GAP = 0.1
"""Share by which the arms' tokens a step, or answer lengths, may differ before it is flagged."""


def check_runs(pair: Pair) -> tuple[Check, ...]:
    """Every check of the runs of a candidate and the baseline, in the order of the report."""
    return tuple(look(pair) for look in (*HEALTH, *MATCHING))


def _need(run: RunRecord, *names: str) -> pd.DataFrame:
    """The run's training rows. Raises Problem where a field was never recorded, or is missing at a step."""
    return _complete(run.training, *names)


def _need_any(run: RunRecord, name: str) -> pd.Series:
    """The recorded values of a field that not every step has. Raises Problem where there is none."""
    if name not in run.training or run.training[name].isna().all():
        raise Problem(f"{name} was never recorded")
    return run.training[name].dropna()


def _complete(rows: pd.DataFrame, *names: str) -> pd.DataFrame:
    for name in names:
        if name not in rows or rows[name].isna().all():
            raise Problem(f"{name} was never recorded")
        if rows[name].isna().any():
            raise Problem(f"{name} is missing at step {rows.index[rows[name].isna()][0]}")
    return rows


@pair_check(
    "run accounting",
    "at most {max_lost} lost an arm; uneven loss: Fisher p ≥ {fisher_p:g}",
    "a mean over survivors flatters the arm that lost its worst runs",
)
def accounting(pair: Pair) -> Finding:
    planned = {name: len(pair.experiment.of(name)) for name in pair.names}
    finished = {name: len(runs) for name, runs in pair.arms.items()}
    lost = [planned[name] - finished[name] for name in pair.names]
    values = {name: f"{finished[name]} of {planned[name]} finished" for name in pair.names}
    rule = pair.plan.lost_run_rule
    p_value = fisher_p(list(success_rates(finished, planned).values()))
    problems = [
        f"{name}: {count} runs lost or unfinished"
        for name, count in zip(pair.names, lost)
        if count > rule.max_lost
    ]
    if p_value < rule.fisher_p:
        problems.append(f"runs were lost unevenly, Fisher p = {p_value:.3g}")
    problems += [f"{name}: no finished run" for name in pair.names if not finished[name]]
    seeds = len(pair.plan.seeds)
    problems += [
        f"{name}: the plan has {seeds} seeds and {planned[name]} runs"
        for name in pair.names
        if planned[name] != seeds
    ]
    return Finding(not problems, values, "; ".join(problems))


@pair_check(
    "finite records",
    "every recorded value is finite, in the file as the run left it",
    "a NaN is a failed step and must not vanish in a mean",
)
def finite_records(pair: Pair) -> Finding:
    def judge(run: RunRecord) -> float:
        if run.faults:
            more = f" and {len(run.faults) - 1} more" if len(run.faults) > 1 else ""
            raise Problem(run.faults[0].removeprefix(f"{run.folder}: ") + more)
        return len(run.metrics)

    return each_run(pair, judge, lambda seen: f"{sum(seen):.0f} records")


@pair_check(
    "full length",
    "the last step is loop.steps",
    "runs of unequal length are compared at different points",
)
def full_length(pair: Pair) -> Finding:
    def judge(run: RunRecord) -> float:
        if run.metrics.empty:
            raise Problem("no records")
        last, planned = int(run.metrics.index[-1]), run.config.get("loop", {}).get("steps")
        if last != planned:
            raise Problem(f"ends at step {last}, loop.steps is {planned}")
        return last

    return each_run(pair, judge, lambda seen: f"{min(seen):.0f} steps")


@pair_check(
    "not restarted",
    "no step was trained twice",
    "a run that is stopped and trains its steps again may have been stopped for what they showed",
    effect="flag",
)
def not_restarted(pair: Pair) -> Finding:
    def judge(run: RunRecord) -> int:
        if run.repeated_steps:
            raise Problem(f"{run.repeated_steps} steps trained again by a later attempt")
        return 0

    return each_run(pair, judge, lambda seen: f"{len(seen)} runs trained each step once")


@pair_check(
    "no forced retry",
    "no run that failed was tried again by force",
    "an outcome tried again until it looks better is a choice of results",
    effect="flag",
)
def no_forced_retry(pair: Pair) -> Finding:
    def judge(run: RunRecord) -> int:
        forced = run.run.get("forced", [])
        if forced:
            states = ", ".join(str(entry.get("state", "?")) for entry in forced)
            raise Problem(f"tried again by force after {states}")
        return 0

    return each_run(pair, judge, lambda seen: f"{len(seen)} runs unforced")


@pair_check(
    "policy updated",
    "optimizer_steps and policy_version rise, and grad_norm > 0, in {updated_share:.0%} of steps",
    "throughput without a policy update is not training",
)
def policy_updated(pair: Pair) -> Finding:
    def judge(run: RunRecord) -> float:
        rows = _need(run, "optimizer_steps", "policy_version", "grad_norm")
        least = pair.plan.validity.updated_share
        for name in ("optimizer_steps", "policy_version"):
            # Both count from 0 at the initial checkpoint, so that the first step has a rise of its own.
            rising = float((rows[name].diff().fillna(rows[name]) > 0).mean())
            if rising < least:
                raise Problem(f"{name} rises in {rising:.0%} of the steps only")
        share = float((rows["grad_norm"] > 0).mean())
        if share < least:
            raise Problem(f"grad_norm > 0 in {share:.0%} of the steps only")
        return share

    return each_run(pair, judge, lambda seen: f"gradient in {min(seen):.0%} of steps")


@pair_check(
    "samples kept",
    "mean kept_fraction ≥ {kept_fraction:g}",
    "a batch rejected whole teaches nothing",
)
def samples_kept(pair: Pair) -> Finding:
    def judge(run: RunRecord) -> float:
        kept = float(_need(run, "kept_fraction")["kept_fraction"].mean())
        if kept < pair.plan.validity.kept_fraction:
            raise Problem(f"keeps {kept:.1%} of its samples")
        return kept

    return each_run(pair, judge, lambda seen: f"{min(seen):.1%} kept at least")


@pair_check(
    "same distribution",
    "p99 ≤ {mismatch_p99:.0e} and max ≤ {mismatch_max:.0e} nats; ≥ {mismatch_tokens} tokens probed "
    "after each refit, those that differ behind a router tie left out",
    "engine and trainer must give a token the same log-probability",
)
def same_distribution(pair: Pair) -> Finding:
    bounds = pair.plan.validity

    def judge(run: RunRecord) -> tuple[float, float]:
        names = ["mismatch_p99", "mismatch_max", "mismatch_tokens"]
        seen = run.metrics.reindex(columns=names).notna().any(axis=1)
        every = run.config.get("probe", {}).get("every", 1)
        due = (run.metrics.index > 0) & (run.metrics.index % every == 0)
        probes = _complete(run.metrics[seen | due], *names)
        for name, bound in (
            ("mismatch_p99", bounds.mismatch_p99),
            ("mismatch_max", bounds.mismatch_max),
        ):
            if probes[name].max() > bound:
                raise Problem(
                    f"{name} {probes[name].max():.2g} at step {probes[name].idxmax()}, bound {bound:.0e}"
                )
        tied = probes.get("tokens_router_tied", 0 * probes["mismatch_tokens"]).fillna(0)
        probed = probes["mismatch_tokens"] + tied
        if probed.min() < bounds.mismatch_tokens:
            raise Problem(f"{probed.min():.0f} tokens probed at step {probed.idxmin()}")
        return float(probes["mismatch_p99"].max()), float(probes["mismatch_max"].max())

    def show(seen: list[tuple[float, float]]) -> str:
        p99, largest = (max(column) for column in zip(*seen))
        return f"p99 {p99:.1e}, max {largest:.1e}"

    return each_run(pair, judge, show)


@pair_check(
    "steady mismatch",
    "p99 grows less than {mismatch_growth:g}-fold over a run, by the slope of its logarithm",
    "a mismatch that grows step by step (weights or caches that drift apart) passes a bound for a while",
    effect="flag",
)
def steady_mismatch(pair: Pair) -> Finding:
    """Theil and Sen's slope of log p99 over the steps: a few odd probes do not tilt it."""

    def judge(run: RunRecord) -> float:
        column = _need_any(run, "mismatch_p99")
        column = column[column > 0]
        if len(column) < 3 or column.nunique() == 1:
            return 1.0
        slope = stats.theilslopes(np.log(column), column.index).slope
        growth = float(np.exp(slope * (column.index[-1] - column.index[0])))
        if growth >= pair.plan.validity.mismatch_growth:
            raise Problem(f"p99 grows {growth:.0f}-fold over the run")
        return growth

    return each_run(pair, judge, lambda seen: f"{max(seen):.2g}-fold at most")


@pair_check(
    "router ties",
    "< {tied_share:.1%} of an arm's probed tokens left out",
    "where two experts score alike rounding chooses; too many such tokens would hide a mismatch",
)
def router_ties(pair: Pair) -> Finding:
    """Pooled over an arm's runs: ties are rare and come in clusters (one takes every later token of its prompt)."""
    if not pair.runs:
        return Finding(None, {}, "no finished run")
    bound = pair.plan.validity.tied_share
    shares = {}
    for name, runs in pair.arms.items():
        probes = [run.metrics.get(["mismatch_tokens", "tokens_router_tied"]) for run in runs]
        if not probes or any(probe is None for probe in probes):
            return Finding(None, {}, f"{name}: ties were never counted")
        scored, tied = (sum(probe[field].sum() for probe in probes) for field in probes[0])
        shares[name] = float(tied / (scored + tied)) if scored + tied else 0.0
    found = [
        f"{name}: {share:.2%} of the probed tokens"
        for name, share in shares.items()
        if share >= bound
    ]
    return Finding(not found, {n: f"{s:.3%}" for n, s in shares.items()}, "; ".join(found))


@pair_check(
    "books closed",
    "generated = trained + dropped + in flight, for tokens and groups, at every step",
    "tokens or groups lost silently bias what is trained on",
)
def books_closed(pair: Pair) -> Finding:
    def judge(run: RunRecord) -> float:
        for unit in ("tokens", "groups"):
            names = [f"{unit}_{book}" for book in ("generated", "trained", "in_flight", "dropped")]
            rows = _need(run, *names[:3])
            dropped = rows.get(names[3], 0 * rows[names[0]]).fillna(0)
            missing = rows[names[0]] - rows[names[1]] - rows[names[2]] - dropped
            if not (missing == 0).all():
                step = missing.index[missing != 0][0]
                raise Problem(f"{missing.loc[step]:.0f} {unit} unaccounted for at step {step}")
        return float(rows["groups_trained"].iloc[-1])

    return each_run(pair, judge, lambda seen: f"{sum(seen):,.0f} groups trained, none missing")


@pair_check(
    "lag bounded", "lag_max ≤ loop.max_staleness", "staler data than declared is another algorithm"
)
def lag_bounded(pair: Pair) -> Finding:
    def judge(run: RunRecord) -> float:
        largest = float(_need(run, "lag_max")["lag_max"].max())
        bound = run.config.get("loop", {}).get("max_staleness")
        if bound is None or largest > bound:
            raise Problem(f"lag_max {largest:g}, loop.max_staleness is {bound}")
        return largest

    return each_run(pair, judge, lambda seen: f"lag at most {max(seen):g}")


@pair_check(
    "similar lag",
    f"mean lag within {LAG_GAP} versions",
    "a slower trainer sees staler data: part of the system, but good to know",
    effect="flag",
)
def similar_lag(pair: Pair) -> Finding:
    means = {
        name: sum(run.training["lag_mean"].mean() for run in runs) / len(runs)
        for name, runs in pair.arms.items()
        if runs and all("lag_mean" in run.training for run in runs)
    }
    values = {name: f"mean lag {mean:.2f}" for name, mean in means.items()}
    if len(means) < 2:
        return Finding(None, values, "lag_mean was never recorded")
    gap = abs(means[pair.candidate] - means[pair.plan.baseline])
    return Finding(
        gap <= LAG_GAP, values, f"mean lag differs by {gap:.2f} versions" if gap > LAG_GAP else ""
    )


@pair_check(
    "similar work",
    f"tokens a step and response length within {WORK_GAP:.0%}",
    "a rate rises where answers are longer: what a step consists of must be alike, or read beside it",
    effect="flag",
    kinds=("speed",),
)
def similar_work(pair: Pair) -> Finding:
    shown: dict[str, list[str]] = {name: [] for name in pair.names}
    problems = []
    for field, text in (("tokens_forward", "tokens a step"), ("response_tokens_mean", "an answer")):
        means = {
            name: float(np.mean([run.training[field].mean() for run in runs]))
            for name, runs in pair.arms.items()
            if runs and all(field in run.training for run in runs)
        }
        if len(means) < 2:
            continue
        for name, mean in means.items():
            shown[name].append(f"{mean:,.4g} {text}")
        low, high = sorted(means.values())
        if low <= 0 or high / low > 1 + WORK_GAP:
            problems.append(f"{text}: {low:,.4g} against {high:,.4g}")
    values = {name: ", ".join(texts) for name, texts in shown.items() if texts}
    if not values:
        return Finding(None, {}, "tokens_forward and response_tokens_mean were never recorded")
    return Finding(not problems, values, "; ".join(problems))


HEALTH = (
    accounting,
    finite_records,
    full_length,
    not_restarted,
    no_forced_retry,
    policy_updated,
    samples_kept,
    same_distribution,
    steady_mismatch,
    router_ties,
    books_closed,
    lag_bounded,
    similar_lag,
    similar_work,
)
