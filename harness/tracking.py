"""The view of run folders in MLflow. ``metrics.jsonl`` is the truth; everything here can be thrown away and made again.

One MLflow experiment an experiment, one parent run a scale, one child a run folder, found again by its identity. What was
written is remembered in ``mlflow.json`` (bytes of metrics read, status, attempt); writing something twice changes nothing.

A step that a later attempt records again is logged again: MLflow keeps both points and takes the later one as current.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

from harness.expand import flatten
from harness.redaction import redact
from harness.run_folder import RunFolder, is_held, read_json, run_folders, write_json
from harness.run_status import RunStatus, queue_lock, read_statuses

PARAMS_PER_BATCH, METRICS_PER_BATCH = 100, 1000
"""Limits of the tracking API."""
STATUS = {
    "DONE": "FINISHED",
    "RUNNING": "RUNNING",
    "WAITING": "SCHEDULED",
    "PLANNED": "SCHEDULED",
    "KILLED": "KILLED",
    "BLOCKED": "KILLED",
    "PREEMPTED": "KILLED",
}
"""Every other state is FAILED, but for UNKNOWN, which leaves MLflow as it is."""


def create_store(uri: str) -> None:
    """Make or upgrade the database behind ``uri``. To be called by one process, before others open it."""
    MlflowClient(uri).search_experiments(max_results=1)


def key_of(name: str) -> str:
    """A metric's name as MLflow allows it: letters, digits and ``_-./: ``."""
    return re.sub(r"[^\w\-./: ]", "_", name.replace("@", "_at_"), flags=re.ASCII)


def points(record: dict[str, Any]) -> Iterator[Metric]:
    """The finite numbers of a record; nested mappings as ``name/key``. MLflow would turn an infinity into 1.8e308."""
    when, step = int(record["time_unix"] * 1000), record["step"]
    for name, value in _leaves(record):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and math.isfinite(value) and name not in ("step", "time_unix", "attempt"):
            yield Metric(key_of(name), float(value), when, step)


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _leaves(inner, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", inner


@dataclass
class Tracker:
    """Brings MLflow up to date with one ``runs/<experiment>/<scale>``. Only one at a time may work on a folder."""

    folder: Path
    uri: str
    client: MlflowClient = field(init=False)
    state: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.client = MlflowClient(self.uri)
        self._all = read_json(self.folder / "mlflow.json") or {}
        self.state = self._all.setdefault(redact(self.uri), {"runs": {}})

    def sync(self) -> int:
        """One pass over all runs; returns the number of records written."""
        if "parent" in self.state and not self._is_there(self.state["parent"]):
            self.state.clear()  # the store is another one than that which was written to
            self.state["runs"] = {}
        if "parent" not in self.state:
            self.state["experiment"] = self._experiment()
            self.state["parent"] = self._find(self._parent_identity) or self._create_parent()
            self._save()
        statuses = {status.run: status for status in read_statuses(self.folder, earlier=True)}
        written = 0
        for folder in run_folders(self.folder):
            if (
                folder.name in statuses
            ):  # else it appeared between the two looks: the next pass has it
                written += self._sync_run(folder, statuses[folder.name])
        self._sync_parent(list(statuses.values()))
        return written

    # One run

    def _sync_run(self, folder: RunFolder, status: RunStatus) -> int:
        known = self.state["runs"].get(folder.name)
        if known is None:
            known = {"run_id": self._child(folder), "offset": 0}
            self.state["runs"][folder.name] = known
            self._save()
        records, offset = new_records(folder.metrics, known["offset"])
        metrics = [point for record in records for point in points(record)]
        for start in range(0, len(metrics), METRICS_PER_BATCH):
            self.client.log_batch(known["run_id"], metrics[start : start + METRICS_PER_BATCH])
        seen = {"state": status.state, "attempt": status.attempt, "why": status.why}
        if offset != known["offset"] or seen != known.get("seen"):
            if seen != known.get("seen") and status.state != "UNKNOWN":
                self._mark(folder, known["run_id"], status)
            known.update(offset=offset, seen=seen)
            self._save()
        return len(records)

    def _mark(self, folder: RunFolder, run_id: str, status: RunStatus) -> None:
        """Status, attempt and reason; the final numbers of a run that is done."""
        done = folder.done
        if done is not None:
            when = int(done["finished"] * 1000)
            final = [
                Metric(key_of(f"final/{name}"), float(value), when, done.get("steps", 0))
                for name, value in done.get("summary", {}).items()
            ]
            self.client.log_batch(run_id, final)
        tags = {"attempt": status.attempt, "status_reason": status.why, "state": status.state}
        run = folder.run
        for name in ("warmup_content_hash",):
            if name in run:
                tags[name] = run[name]
        if "conformance" in run:
            tags["conformance_passed"] = run["conformance"]["passed"]
        self.client.log_batch(run_id, tags=[RunTag(k, str(v)) for k, v in tags.items()])
        self._set_status(run_id, STATUS.get(status.state, "FAILED"))

    def _set_status(self, run_id: str, status: str) -> None:
        if status in ("RUNNING", "SCHEDULED"):
            self.client.update_run(run_id, status=status)
        else:
            self.client.set_terminated(run_id, status=status)

    def _child(self, folder: RunFolder) -> str:
        """The child of this identity, made with its parameters where there is none."""
        run = folder.run
        found = self._find(run["identity"])
        if found is not None:
            return found
        tags = {
            "mlflow.runName": folder.name,
            "mlflow.parentRunId": self.state["parent"],
            "mlflow.source.git.commit": run.get("git", {}).get("commit"),
            **{name: run[name] for name in ("identity", "kind", "system", "seed", "role", "scale")},
            "code": run["fingerprints"]["code"],
            "folder": str(folder.path.resolve()),
        }
        return self._create(tags, flatten(run["config"]))

    # The parent

    @property
    def _parent_identity(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    def _create_parent(self) -> str:
        plan = read_json(self.folder / "plan.json") or {}
        tags = {
            "mlflow.runName": self.folder.name,
            "mlflow.note.content": plan.get("question"),
            "identity": self._parent_identity,
            "kind": "experiment",
            "scale": self.folder.name,
        }
        runs = [folder.run for folder in run_folders(self.folder)]
        # Of a part of the experiment (submit --only) there may be none yet.
        replicates = [run for run in runs if run["role"] in ("candidate", "baseline")] or runs
        shared = {k: v for k, v in replicates[0]["config"].items() if k not in ("trainer", "seed")}
        return self._create(tags, flatten(shared))

    def _sync_parent(self, statuses: list[RunStatus]) -> None:
        states = [status.state for status in statuses]
        open_ = {"RUNNING", "WAITING", "UNKNOWN"}.intersection(states)
        working = is_held(queue_lock(self.folder)) or bool(open_)
        done = states.count("DONE")
        status = "RUNNING" if working else "FINISHED" if done == len(states) else "FAILED"
        seen = {"status": status, "done": f"{done} of {len(states)}"}
        if seen != self.state.get("seen"):
            self.client.set_tag(self.state["parent"], "runs_done", seen["done"])
            self._set_status(self.state["parent"], status)
            self.state["seen"] = seen
            self._save()
        self._sync_report()

    def _sync_report(self) -> None:
        report = self.folder / "report"
        files = sorted(path for path in report.rglob("*") if path.is_file())
        print_ = [[str(f.relative_to(report)), f.stat().st_size, f.stat().st_mtime] for f in files]
        if files and print_ != self.state.get("report"):
            self.client.log_artifacts(self.state["parent"], str(report), "report")
            self._log_verdicts(read_json(report / "report.json") or {})
            self.state["report"] = print_
            self._save()

    def _log_verdicts(self, report: dict[str, Any]) -> None:
        """Verdicts as tags of the parent, each run's value of a valid endpoint as ``final/<endpoint>`` of its child."""
        plan = read_json(self.folder / "plan.json") or {"identities": {}}
        runs = {
            (run["system"], str(run["seed"])): name
            for name, run in plan["identities"].items()
            if run.get("purpose", "replicate") == "replicate"
        }
        for endpoint in report.get("endpoints", []):
            name = f"verdict {endpoint['name']}: {endpoint['candidate']}"
            self.client.set_tag(self.state["parent"], key_of(name), endpoint["headline"])
            if endpoint["verdict"] == "INVALID":
                continue
            for system, values in endpoint["values"].items():
                for seed, value in values.items():
                    run_id = self.state["runs"][runs[system, seed]]["run_id"]
                    self.client.log_metric(run_id, key_of(f"final/{endpoint['name']}"), value)

    # MLflow

    def _experiment(self) -> str:
        name = self.folder.parent.name
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        local = self.uri.startswith("sqlite:")
        place = (self.folder.parents[1] / "mlartifacts").resolve().as_uri() if local else None
        return self.client.create_experiment(name, artifact_location=place)

    def _is_there(self, run_id: str) -> bool:
        try:
            self.client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise
            return False
        return True

    def _find(self, identity: str) -> str | None:
        found = self.client.search_runs(
            [self.state["experiment"]], f"tags.identity = '{identity}'", max_results=1
        )
        return found[0].info.run_id if found else None

    def _create(self, tags: dict[str, Any], params: dict[str, Any]) -> str:
        given = {key: str(value) for key, value in tags.items() if value is not None}
        run_id = self.client.create_run(self.state["experiment"], tags=given).info.run_id
        listed = [Param(key_of(key), str(value)) for key, value in params.items()]
        for start in range(0, len(listed), PARAMS_PER_BATCH):
            self.client.log_batch(run_id, params=listed[start : start + PARAMS_PER_BATCH])
        return run_id

    def _save(self) -> None:
        write_json(self.folder / "mlflow.json", self._all)


def new_records(metrics: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """(whole records after ``offset``, the offset after them). Of a step that is there twice, the later record."""
    if not metrics.exists():
        return [], offset
    with open(metrics, "rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    by_step = {}
    for line in whole.splitlines():
        record = json.loads(line)
        by_step[record["step"]] = record
    return list(by_step.values()), offset + len(whole)
