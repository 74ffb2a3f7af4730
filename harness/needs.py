"""What a run needs of others before it starts, and what it takes over from them into its own record."""

from __future__ import annotations

from typing import Any

from analysis.plan import Plan
from harness.run_folder import RunFolder


def unmet_need(folder: RunFolder) -> str:
    """Why this run cannot start, "" where it can: what it needs ended otherwise, or its arms do not conform."""
    for need in folder.needs:
        done = need.done
        if done is None:
            ended = need.end
            return (
                f"needs {need.name}, which {'ended ' + ended['reason'] if ended else 'is not done'}"
            )
        if done.get("conformance", {}).get("passed") is False:
            detail = done["conformance"].get("detail", "see its conformance.json")
            return f"{need.name} found that the arms do not make the same update: {detail}"
    return ""


def inherited(folder: RunFolder) -> dict[str, Any]:
    """What the runs it needs have found: the initial checkpoint's content hash, the conformance of its pair."""
    facts: dict[str, Any] = {}
    figures = {}
    for need in folder.needs:
        done = need.done or {}
        if "content_hash" in done:
            facts["warmup_content_hash"] = done["content_hash"]
        if "conformance" in done:
            figures[need.name] = done["conformance"]
    if figures:
        passed = all(figure["passed"] for figure in figures.values())
        facts["conformance"] = {"passed": passed, "pairs": figures}
    return facts


def plan_digest(folder: RunFolder) -> str | None:
    """That of the plan which stands now, None where there is none: the report knows by it that the plan is the same."""
    path = folder.path.parent / "plan.json"
    return Plan.load(path).digest if path.exists() else None
