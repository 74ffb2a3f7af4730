"""How an attempt ended, in one word and one sentence, and what makes a run done. The words: ``harness/causes.py``."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import time
from pathlib import Path
from typing import Any

from harness.causes import cause, is_memory, told_by
from harness.run_folder import RunFolder, read_json, tail_records, write_json

EXIT_CONFIG, EXIT_JUDGED, EXIT_STOPPED = 2, 3, 4
"""Exit codes of the commands that say more than failure."""
CRASHES = frozenset(
    getattr(signal, f"SIG{name}") for name in ("SEGV", "ABRT", "BUS", "ILL", "FPE", "SYS", "TRAP")
)
"""Signals by which a program ends itself: a fault of its own code, and no word from outside."""
OF_FIGURES = frozenset({"DIVERGED", "EVERYTHING_DROPPED"})
"""Judgements of what the run itself has measured, which no signal and no lost process brings about."""
OF_A_DEATH = frozenset({"ENGINE", "WORKER_DIED", "NODE_FAIL", "INFRA"})
"""Judgements that a process killed for memory explains; any other stands, whatever was killed and survived before."""


class Unfinished(RuntimeError):
    """The command ended with 0 and its product is not there; the message says what is missing."""


def product(folder: RunFolder) -> dict[str, Any]:
    """Check that what the run was for exists; returns what ``done.json`` says of it. Raises Unfinished."""
    run = folder.run
    made = {"warmup": _warmed_up, "conformance": _conforms}.get(run["kind"], _trained)
    return made(folder, run)


def _trained(folder: RunFolder, run: dict[str, Any]) -> dict[str, Any]:
    steps = run["config"]["loop"]["steps"]
    attempt = int(folder.attempts[-1].name)
    last = next(iter(tail_records(folder.metrics, 1)), {})
    beat = folder.heartbeat or {}
    before = beat.get("attempt") if beat.get("phase") == "finished" else None  # it found all done
    if last.get("step") != steps or last.get("attempt") not in {attempt, before} - {None}:
        raise Unfinished(
            f"metrics.jsonl ends at step {last.get('step', 'none')} of attempt {last.get('attempt', 'none')}, "
            f"not at step {steps} of attempt {attempt}"
        )
    digest = hashlib.sha256(folder.metrics.read_bytes()).hexdigest()
    return {"steps": steps, "metrics_sha256": digest, "summary": summarise(folder.metrics)}


def _warmed_up(folder: RunFolder, run: dict[str, Any]) -> dict[str, Any]:
    facts = read_json(folder.path / "checkpoint" / "warmup.json")
    if facts is None or "content_hash" not in facts:
        raise Unfinished("checkpoint/warmup.json with a content_hash is not there")
    return {"content_hash": facts["content_hash"], "summary": _numbers(facts)}


def _conforms(folder: RunFolder, run: dict[str, Any]) -> dict[str, Any]:
    facts = read_json(folder.path / "conformance.json")
    if facts is None or "passed" not in facts:
        raise Unfinished("conformance.json with `passed` is not there")
    return {"conformance": facts, "summary": _numbers(facts)}


def summarise(metrics: Path) -> dict[str, float]:
    """The last value of what was measured at the end, and means over the last ten training steps.

    A step recorded by two attempts counts once, as the later attempt saw it. Rates are the analysis's business.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        by_step[record["step"]] = record
    records = [by_step[step] for step in sorted(by_step)]
    trained = [record for record in records if record["step"] > 0]
    summary: dict[str, float] = {}
    for record in records:
        summary |= {k: v for k, v in record.items() if k.startswith("eval_")}
    for name in ("reward_mean", "loss", "grad_norm", "entropy", "response_tokens_mean"):
        values = [record[name] for record in trained[-10:] if name in record]
        if values:
            summary[f"{name}_last10"] = sum(values) / len(values)
    for name in ("wall_s", "t_wait_s", "t_forward_backward_s", "t_optimizer_s", "tokens_forward"):
        values = [record[name] for record in trained if name in record]
        if values:
            summary[f"{name}_total"] = sum(values)
    worst = [record["mismatch_max"] for record in records if "mismatch_max" in record]
    return _numbers(summary | ({"mismatch_max": max(worst)} if worst else {}))


def judge_exit(
    folder: RunFolder, attempt: Path, code: int, killed_for_memory: bool = False
) -> tuple[str, str]:
    """(state, reason) of a command that ended by itself with ``code`` (negative: by that signal).

    ``killed_for_memory``: the kernel did so to some process of this job meanwhile.
    A run that is done gets its ``done.json`` here, before anything else says that it is done.
    """
    if code == 0:
        try:
            made = product(folder)
        except (Unfinished, ValueError, KeyError) as error:
            return "FAILED", f"ended with exit code 0, but {error}"
        done = {"attempt": int(attempt.name), "finished": time.time(), **made}
        write_json(folder.path / "done.json", done)
        return "DONE", ""
    said = last_words(attempt / "output.log")
    facts = (read_json(attempt / "reason.json") or {}) if code == EXIT_JUDGED else {}
    if facts:
        write_json(attempt / "reason.json", facts)  # in the run's own words until now, secrets too
    # Where another node was lost, this one's memory is not to blame.
    by_a_death = facts.get("reason") in OF_A_DEATH and not facts.get("nodes")
    if killed_for_memory and (code == -signal.SIGKILL or by_a_death):
        return "OOM", f"the kernel killed for memory on this node; the command's last words: {said}"
    if -code in CRASHES:
        crashed = f"{signal.Signals(-code).name} ended the command, a crash of its own: {said}"
        return told_by(said) or "FAILED", crashed
    if code == -signal.SIGKILL and is_memory(
        said
    ):  # a step of Slurm's, whose group is gone with it
        return "OOM", said
    if code < 0:
        return "KILLED", f"{signal.Signals(-code).name} ended the command"
    if code == EXIT_JUDGED:
        state, detail = facts.get("reason", "JUDGED"), facts.get("detail", said)
        return told_by(detail) or state, detail
    if code == EXIT_STOPPED:
        return "KILLED", "told to save and stop, it did; it goes on from there"
    if code == EXIT_CONFIG and not _recorded(folder, attempt):
        return "CONFIG", f"exit code {code}: {said}"
    return told_by(said) or "FAILED", f"exit code {code}: {said}"


def judge_told(
    folder: RunFolder, attempt: Path, code: int | None, alone: bool
) -> tuple[str, str] | None:
    """(state, reason) of a command that was told to end and is done, or ended by an outcome first; None where it obeyed.

    ``alone``: no other process of the run was told, so that every outcome is its own; else its judgement of its figures is.
    """
    if code is None or code < 0:
        return None
    state, reason = judge_exit(folder, attempt, code)
    if code == 0:
        return (state, reason) if state == "DONE" else None
    outcome = cause(state).kind == "outcome" if alone else state in OF_FIGURES
    return (state, reason) if outcome else None


def _recorded(folder: RunFolder, attempt: Path) -> bool:
    """True where the attempt has measured something: it was not told anything impossible."""
    last = next(iter(tail_records(folder.metrics, 1)), {})
    return last.get("attempt") == int(attempt.name)


def last_lines(log: Path, count: int = 30, block: int = 64 * 1024) -> list[str]:
    """The last lines of a log, whatever bytes are in it."""
    if not log.exists():
        return []
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - block))
        return file.read().decode(errors="replace").splitlines()[-count:]


def last_words(log: Path) -> str:
    """The line of a log that most likely says why: the last that names an error (``what()``: C++'s), else the last."""
    lines = [line.strip() for line in last_lines(log, 200) if line.strip()]
    heads = [(line.partition(":")[0], line) for line in lines]
    named = [line for head, line in heads if head.endswith(("Error", "Exception", "what()"))]
    fatal = [line for head, line in heads if head == "Fatal Python error"]  # before the stacks
    return (named or fatal or lines or ["no output"])[-1][:500]


def _numbers(facts: dict[str, Any]) -> dict[str, float]:
    return {
        key: value
        for key, value in facts.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
