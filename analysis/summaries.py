"""One number a run: the pre-declared summary of an endpoint. Steps are never samples, and nothing is smoothed here.

value = summarise(endpoint, run, plan.exclusion)
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.endpoint import CUMULATIVE, STEPS, Endpoint, Rate
from analysis.load import RunRecord, steady
from analysis.plan import ExclusionRules
from analysis.thresholds import Crossing


class SummaryError(ValueError):
    """A run that lacks what an endpoint needs; the message names run, field and step."""


def summarise(endpoint: Endpoint, run: RunRecord, rules: ExclusionRules) -> float:
    """The endpoint's value for a run, in the endpoint's unit. Raises SummaryError where the record lacks a field."""
    if isinstance(endpoint.field, Rate):
        return _total_rate(endpoint, run, rules)
    if endpoint.threshold is not None:
        return crossing(endpoint, run).value
    series = curve(endpoint, run)
    if endpoint.summary == "at_last_step":
        last = run.metrics.index[-1]
        if series.index[-1] != last:
            raise SummaryError(
                f"{run.folder}: {endpoint.field} is missing at the last step {last}; latest at step {series.index[-1]}"
            )
        return float(series.iloc[-1])
    if endpoint.summary == "final_window_mean":
        if len(series) < endpoint.window:
            raise SummaryError(
                f"{run.folder}: {endpoint.field} has {len(series)} records, the window is {endpoint.window}"
            )
        return float(series.iloc[-endpoint.window :].mean())
    span = series.index[-1] - series.index[0]
    if span == 0:
        raise SummaryError(f"{run.folder}: {endpoint.field} has one record, an area needs two")
    return float(np.trapezoid(series.to_numpy(), series.index.to_numpy()) / span)


def crossing(endpoint: Endpoint, run: RunRecord) -> Crossing:
    """The first recorded step at which the field is at the threshold or above, or the seconds of wall time up to its end.

    A run that never gets there is censored where it ends. Raises SummaryError where it starts there already.
    """
    series = curve(endpoint, run)
    there = series.index[series >= endpoint.threshold]
    if len(there) and there[0] == series.index[0]:
        raise SummaryError(
            f"{run.folder}: {endpoint.field} is {series.iloc[0]:g} at its first record, the threshold "
            f"{endpoint.threshold:g} was no way to go"
        )
    step = int(there[0] if len(there) else run.metrics.index[-1])
    if endpoint.summary == "steps_to_threshold":
        return Crossing(float(step), bool(len(there)))
    rows = run.training.loc[:step]
    if "wall_s" not in rows or rows["wall_s"].isna().any():
        raise SummaryError(f"{run.folder}: wall_s is not recorded at every step up to {step}")
    return Crossing(float(rows["wall_s"].sum()), bool(len(there)))


def curve(endpoint: Endpoint, run: RunRecord) -> pd.Series:
    """The recorded values of a one-field endpoint by step. Raises SummaryError where there are none."""
    if endpoint.field not in run.metrics:
        raise SummaryError(f"{run.folder}: no record has the field {endpoint.field}")
    series = run.metrics[endpoint.field].dropna()
    if series.empty:
        raise SummaryError(f"{run.folder}: {endpoint.field} is null in every record")
    return series


def initial_value(endpoint: Endpoint, run: RunRecord) -> float:
    """Where a learning endpoint started: its first record, or the mean of its first window."""
    return float(curve(endpoint, run).iloc[: endpoint.window or 1].mean())


def _total_rate(endpoint: Endpoint, run: RunRecord, rules: ExclusionRules) -> float:
    """Sum of the numerators over sum of the denominators across steady steps (statistics: a ratio of totals)."""
    rows = steady(run, rules)
    if rows.empty:
        raise SummaryError(f"{run.folder}: no steady step is left for {endpoint.name}")

    def total(names: tuple[str, ...]) -> float:
        amount = 0.0
        for name in names:
            if name == STEPS:
                amount += len(rows)
                continue
            if name not in rows:
                raise SummaryError(f"{run.folder}: no record has the field {name}")
            added = _each_step(run, name)[rows.index]
            if added.isna().any():
                missing = added.index[added.isna()][0]
                raise SummaryError(f"{run.folder}: {name} is missing at step {missing}")
            amount += float(added.sum())
        return amount

    denominator = total(endpoint.field.denominator)
    if denominator == 0:
        raise SummaryError(f"{run.folder}: {' + '.join(endpoint.field.denominator)} sums to 0")
    return total(endpoint.field.numerator) / denominator


def _each_step(run: RunRecord, name: str) -> pd.Series:
    """What every training step added; a field that counts from the start of the run is taken apart again."""
    column = run.training[name]
    return column - column.shift(fill_value=0) if name in CUMULATIVE else column


def mean_over_steps(metrics: pd.DataFrame, field: str) -> float:
    """Total of ``field`` over the number of steps: a part that few steps have, an evaluation say, counts as rarely as it is."""
    return float(metrics[field].sum() / len(metrics)) if field in metrics and len(metrics) else 0.0
