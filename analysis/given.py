"""Numbers that somebody hands over: a table of one number a run, or published mean, SD and n. Read, and refused in words.

A row is a run. A table of steps, a row given twice or an arm without a name would count what is no run, so they are errors.

    given = from_table(Path("runs.csv"), by="system", value=None)
    given.samples["megatron"]
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.inference import stand_in_sample
from analysis.sample_size import MAX_RUNS

RUN_COLUMNS = ("seed", "run", "run_id", "replicate")
"""Columns that say which run of an arm a row is."""
STEP_COLUMNS = ("step", "steps", "global_step", "_step", "iteration", "iter", "update", "epoch")
"""Columns that say when within a run a row was written."""
UNNAMED_RUNS = f"no column says which run a row is ({', '.join(RUN_COLUMNS)}): each row was taken for a run of its own"


class InputError(ValueError):
    """Numbers or options that cannot be compared; the message says what to change."""


@dataclass(frozen=True)
class Given:
    """Arm -> one number a run; ``name``: the column; ``notes``: what must be said beside any verdict on them."""

    name: str
    samples: Mapping[str, list[float]]
    notes: tuple[str, ...] = ()


def from_summaries(text: Sequence[str]) -> Given:
    """``name:mean,sd,n`` -> for each name a sample with exactly these. Raises InputError."""
    samples: dict[str, list[float]] = {}
    for item in text:
        name, _, numbers = item.partition(":")
        if name in samples:
            raise InputError(
                f"--summary {item}: {name} is given twice; each arm needs its own name"
            )
        try:
            mean, sd, n = numbers.split(",")
            if int(n) > MAX_RUNS:
                raise InputError(f"--summary {item}: n counts runs, and {n} are no runs")
            samples[name] = list(stand_in_sample(float(mean), float(sd), int(n)))
        except InputError:
            raise
        except ValueError as error:
            raise InputError(f"--summary {item}: write NAME:MEAN,SD,N ({error})") from error
    return Given("value", samples)


def from_table(path: Path, by: str, value: str | None, pair_by: str | None = None) -> Given:
    """Each arm's numbers, with ``pair_by`` in the order of that column. Raises InputError."""
    table = _read(path, by)
    for option, column in (("--by", by), ("--pair-by", pair_by)):
        if column is not None and column not in table:
            raise InputError(
                f"{path}: no column {column}; {option} takes one of {', '.join(table.columns)}"
            )
    column = _value_column(path, table, value, by, {by, pair_by, *RUN_COLUMNS, *STEP_COLUMNS})
    _require_arms(path, table, by)
    notes = _require_one_row_a_run(path, table.drop(columns=column), by)
    table[column] = _numbers(path, table[column])
    if pair_by is None:
        groups = table.groupby(by, sort=False)[column]
        return Given(column, {str(arm): list(rows) for arm, rows in groups}, notes)
    return Given(column, _paired(path, table, by, column, pair_by))


def parse_margin(text: str) -> tuple[float, bool]:
    """ "10%" -> (0.1, relative); "0.03" -> (0.03, absolute). Raises InputError."""
    relative = text.endswith("%")
    try:
        margin = float(text.removesuffix("%")) / (100 if relative else 1)
    except ValueError as error:
        raise InputError(f"--margin {text}: write 10% or a number in the unit") from error
    if not (margin > 0 and math.isfinite(margin)):
        raise InputError(f"--margin {text}: a margin is positive and finite")
    if relative and margin >= 1:
        raise InputError(f"--margin {text}: a relative margin is below 100%; 10% is a usual one")
    return margin, relative


def _read(path: Path, by: str) -> pd.DataFrame:
    """The table, one row a run. Raises InputError."""
    try:
        if path.suffix != ".json":
            return pd.read_csv(path)
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a table: {error}") from error
    if isinstance(data, dict) and all(isinstance(v, list) for v in data.values()):
        data = [
            {by: arm, "run": number, "value": value}
            for arm, values in data.items()
            for number, value in enumerate(values)
        ]
    if not (isinstance(data, list) and data and all(isinstance(row, dict) for row in data)):
        raise InputError(
            f'{path}: write a list of objects, [{{"{by}": "molt", "value": 1.5}}, ...], or arm -> list of numbers'
        )
    return pd.DataFrame(data)


def _value_column(path: Path, table: pd.DataFrame, value: str | None, by: str, others: set) -> str:
    numeric = [c for c in table.select_dtypes("number").columns if c not in others]
    if value is None and len(numeric) != 1:
        choice = f"--value {' or '.join(numeric)}" if numeric else "no column holds numbers"
        raise InputError(f"{path}: say which number to compare: {choice}")
    column = numeric[0] if value is None else value
    if column not in table or column == by:
        what = f"column {column} names the arm" if column == by else f"no column {column}"
        raise InputError(f"{path}: {what}; --value takes one of {', '.join(numeric)}")
    return column


def _require_arms(path: Path, table: pd.DataFrame, by: str) -> None:
    unnamed = table.index[table[by].isna() | (table[by].astype(str).str.strip() == "")]
    if len(unnamed):
        raise InputError(f"{path}: row {unnamed[0] + 1} has no {by}; name its arm or delete it")


def _require_one_row_a_run(path: Path, table: pd.DataFrame, by: str) -> tuple[str, ...]:
    """What must be said of the rows. Raises InputError where they are no runs: steps, or the same run again."""
    named = [c for c in RUN_COLUMNS if c in table and c != by]
    again = table.duplicated([by, *named]) if named else pd.Series(False, index=table.index)
    steps = [c for c in table if str(c).lower() in STEP_COLUMNS and table[c].nunique() > 1]
    if steps and (again.any() or not named):
        raise InputError(
            f"{path}: the rows are steps of a run ({steps[0]} varies), and steps are no samples; give one number a run, "
            "the value at a fixed step or the mean of a fixed window, say"
        )
    if again.any():
        row = table[again].iloc[0]
        which = ", ".join(f"{c} {row[c]}" for c in named)
        raise InputError(f"{path}: {row[by]} has several rows with {which}; give one number a run")
    return () if named else (UNNAMED_RUNS,)


def _numbers(path: Path, column: pd.Series) -> pd.Series:
    numbers = pd.to_numeric(column, errors="coerce")
    wrong = column.index[numbers.isna() & column.notna()]
    if len(wrong):
        raise InputError(
            f"{path}: row {wrong[0] + 1} has {column.name} {column[wrong[0]]!r}; it takes numbers"
        )
    return numbers.astype(float)


def _paired(
    path: Path, table: pd.DataFrame, by: str, column: str, pair_by: str
) -> dict[str, list[float]]:
    counts = table.groupby([pair_by, by]).size()
    if (counts > 1).any():
        unit, arm = counts[counts > 1].index[0]
        raise InputError(f"{path}: {arm} has several rows with {pair_by} {unit}; a pair needs one")
    wide = table.pivot_table(index=pair_by, columns=by, values=column, aggfunc=list, sort=False)
    whole = wide.dropna()
    if len(whole) < len(wide):
        alone = ", ".join(map(str, wide.index.difference(whole.index)))
        raise InputError(f"{path}: {pair_by} {alone} is not in every arm; pairs need both")
    return {str(arm): [cell[0] for cell in whole[arm]] for arm in whole.columns}
