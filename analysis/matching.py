"""Do the arms differ in the arm and in nothing else? Protocol, prompts, initial weights, code, hardware, conformance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from analysis.checks import Finding, Pair, pair_check
from analysis.load import RunRecord

ARM_OWNED = ("trainer", "seed")
"""Top-level keys of a run's configuration that are not the protocol."""


@pair_check(
    "same protocol",
    "equal but for " + " and ".join(ARM_OWNED) + ", and the switch where one is declared",
    "what else differs may make the difference",
)
def same_protocol(pair: Pair) -> Finding:
    differing = differing_keys([protocol(run.config) for run in pair.runs])
    differing.pop(pair.plan.switch, None)  # the declared difference; that it holds is in the report
    values = {name: f"runs compared: {len(runs)}" for name, runs in pair.arms.items()}
    if not all(run.config for run in pair.runs):
        return Finding(False, values, "run.json holds no config")
    found = "; ".join(
        f"{key}: {' or '.join(sorted(map(str, seen)))}" for key, seen in differing.items()
    )
    return Finding(not differing if pair.runs else None, values, found)


@pair_check(
    "same prompts",
    "prompts_fingerprint equal at every step of a seed",
    "the same seed must see the same prompts in the same order",
)
def same_prompts(pair: Pair) -> Finding:
    by_seed: dict[int, list[RunRecord]] = {}
    for run in pair.runs:
        by_seed.setdefault(run.seed, []).append(run)
    shared = {seed: runs for seed, runs in by_seed.items() if len(runs) == 2}
    values = {
        name: f"seeds {', '.join(str(run.seed) for run in runs)}"
        for name, runs in pair.arms.items()
    }
    if not shared:
        return Finding(None, values, "no seed finished in both arms")
    problems = []
    for seed, (first, second) in sorted(shared.items()):
        prints = [run.training.get("prompts_fingerprint") for run in (first, second)]
        if any(column is None or column.isna().any() for column in prints):
            problems.append(f"seed {seed}: prompts_fingerprint was not recorded at every step")
            continue
        steps = prints[0].index.intersection(prints[1].index)
        unequal = steps[(prints[0].loc[steps] != prints[1].loc[steps]).to_numpy()]
        if len(unequal):
            problems.append(f"seed {seed}: prompts differ from step {unequal[0]}")
    return Finding(not problems, values, "; ".join(problems))


@pair_check(
    "same initial checkpoint", "one content hash", "arms that start elsewhere end elsewhere"
)
def same_checkpoint(pair: Pair) -> Finding:
    return _same(pair, "warmup_content_hash")


@pair_check("same code", "one fingerprint", "a change between runs is confounded with the arm")
def same_code(pair: Pair) -> Finding:
    return _same(pair, "fingerprints", "code")


@pair_check(
    "same packages",
    "one fingerprint",
    "library versions move speed and, at times, numbers",
    effect="flag",
)
def same_packages(pair: Pair) -> Finding:
    """By the hash that each run.json holds, and by name over every attempt: a run may go on after an upgrade."""
    finding = _same(pair, "fingerprints", "packages")
    installed = [span.packages for run in pair.runs for span in run.spans if span.packages]
    versions = differing_keys([dict(packages) for packages in installed])
    named = [f"{name} {' or '.join(sorted(seen))}" for name, seen in sorted(versions.items())]
    if not named:
        return finding
    more = f" and {len(named) - 5} more" if len(named) > 5 else ""
    return Finding(False, finding.values, f"{'; '.join(named[:5])}{more}".replace('"', ""))


@pair_check(
    "same hardware",
    "one fingerprint",
    "a time on other hardware is another quantity",
    kinds=("speed",),
)
def same_hardware(pair: Pair) -> Finding:
    return _same(pair, "fingerprints", "hardware")


@pair_check(
    "same hardware for learning",
    "one fingerprint",
    "other kernels round otherwise: good to know, where it is the arm that differs",
    effect="flag",
    kinds=("learning", "other"),
)
def same_hardware_learning(pair: Pair) -> Finding:
    return _same(pair, "fingerprints", "hardware")


@pair_check(
    "interleaved in time",
    "neither arm ends before the other starts",
    "a machine that slows down over the day would look like an arm",
    effect="flag",
    kinds=("speed",),
)
def interleaved(pair: Pair) -> Finding:
    spans = {}
    for name, runs in pair.arms.items():
        times = [run.metrics["time_unix"] for run in runs if "time_unix" in run.metrics]
        if times:
            spans[name] = (min(t.min() for t in times), max(t.max() for t in times))
    if len(spans) < 2:
        return Finding(None, {}, "time_unix was never recorded")
    values = {name: f"over {(end - start) / 60:.0f} min" for name, (start, end) in spans.items()}
    if min(len(runs) for runs in pair.arms.values()) < 2:
        return Finding(None, values, "one run an arm cannot be interleaved")
    first, second = sorted(spans, key=lambda name: spans[name][0])
    apart = spans[first][1] <= spans[second][0]
    return Finding(
        not apart, values, f"every run of {first} ended before {second} began" if apart else ""
    )


@pair_check(
    "same nodes",
    "the arms share a node, or every run has nodes of its own",
    "arms that ran on different machines differ by the machines too",
    effect="flag",
    kinds=("speed",),
)
def same_nodes(pair: Pair) -> Finding:
    hosts = {
        name: sorted({span.host for run in runs for span in run.spans})
        for name, runs in pair.arms.items()
    }
    values = {name: _some(seen) for name, seen in hosts.items()}
    if not all(hosts.values()):
        return Finding(None, values, "no attempt records its host")
    counts = [len(seen) for seen in hosts.values()]
    runs = [len(runs) for runs in pair.arms.values()]
    apart = not set.intersection(*map(set, hosts.values())) and counts != runs
    return Finding(not apart, values, "the arms never ran on one node" if apart else "")


def _some(names: list[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


@pair_check(
    "conformance",
    "three steps on one batch agree",
    "both trainers must make the same update to be compared",
)
def conformance(pair: Pair) -> Finding:
    """The candidate's runs carry the figures of its pair with the baseline."""
    runs = pair.arms[pair.candidate]
    passed = {run.folder: run.run.get("conformance", {}).get("passed") for run in runs}
    count = sum(value is True for value in passed.values())
    values = {pair.candidate: f"passed in {count} of {len(runs)} runs"}
    if runs:
        values[pair.plan.baseline] = _differences(runs[0].run.get("conformance", {}))
    failed = [folder for folder, value in passed.items() if value is False]
    if failed:
        return Finding(False, values, f"failed in {', '.join(failed)}")
    if not runs or count < len(runs):
        return Finding(None, values, "run.json of some run records no conformance")
    return Finding(True, values, "")


def _differences(figures: Mapping[str, Any]) -> str:
    """The measured differences of a conformance, e.g. "logprob 3.1e-06, loss 7.0e-08"."""
    pairs = figures.get("pairs", {"": figures}).values()
    return ", ".join(
        f"{name.removesuffix('_difference')} {value:.1e}"
        for pair in pairs
        for name, value in pair.items()
        if name.endswith("_difference")
    )


@pair_check(
    "nothing beyond the plan",
    "no run outside plan.json",
    "runs added or repeated after looking may be a selection",
    effect="flag",
)
def nothing_beyond(pair: Pair) -> Finding:
    extra = {
        name: [run.folder for run in pair.experiment.beyond if run.system == name]
        for name in pair.names
    }
    folders = [folder for names in extra.values() for folder in names]
    values = {name: f"{len(names)} beyond" for name, names in extra.items()}
    return Finding(
        not folders, values, f"not in the analysis: {', '.join(folders)}" if folders else ""
    )


@pair_check(
    "plan as frozen",
    "every attempt began under this plan, or under one that an amendment names",
    "a plan that is edited by hand may have been edited to please",
)
def plan_as_frozen(pair: Pair) -> Finding:
    known, problems, noted = pair.plan.digests, [], 0
    for run in pair.runs:
        for span in run.spans:
            noted += span.plan is not None
            if span.plan is not None and span.plan not in known:
                problems.append(f"{run.folder}: attempt {span.number} began under another plan")
    values = {name: f"{len(runs)} runs" for name, runs in pair.arms.items()}
    if not noted:
        return Finding(None, values, "no attempt notes the plan that it began under")
    return Finding(not problems, values, "; ".join(problems))


@pair_check(
    "no result removed",
    "every replicate that had records is still planned",
    "runs left out after they were seen make any result",
)
def nothing_removed(pair: Pair) -> Finding:
    gone = {
        name: [folder for folder, system in pair.plan.removed_late.items() if system == name]
        for name in pair.names
    }
    folders = [folder for names in gone.values() for folder in names]
    values = {name: f"{len(names)} removed" for name, names in gone.items()}
    found = f"taken out of the plan after they had records: {', '.join(folders)}"
    return Finding(not folders, values, found if folders else "")


def protocol(config: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a configuration that every arm must share, by dotted key."""
    return dict(leaves({key: value for key, value in config.items() if key not in ARM_OWNED}))


def differing_keys(leaves: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Keys on which flattened configurations disagree, with the values seen (as JSON)."""
    seen: dict[str, set[str]] = {}
    for key in dict.fromkeys(key for side in leaves for key in side):
        values = {json.dumps(side.get(key), sort_keys=True) for side in leaves}
        if len(values) > 1:
            seen[key] = values
    return seen


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf of a nested mapping."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _same(pair: Pair, *keys: str) -> Finding:
    """Equal, present ``run.json`` values over all runs of both arms."""

    def text(run: RunRecord) -> str | None:
        value: Any = run.run
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            return ", ".join(f"{name} {inner}" for name, inner in sorted(value.items()))
        return None if value is None else str(value)

    seen = {name: {text(run) for run in runs} for name, runs in pair.arms.items()}
    values = {
        name: " or ".join(sorted("not recorded" if t is None else _short(t) for t in texts))
        for name, texts in seen.items()
    }
    every = set().union(*seen.values())
    key = ".".join(keys)
    if None in every or not every:
        return Finding(None, values, f"{key} is not recorded in every run.json")
    return Finding(
        len(every) == 1, values, f"{key} has {len(every)} values" if len(every) > 1 else ""
    )


def _short(text: str) -> str:
    """A hash by its head."""
    is_hash = re.fullmatch(r"[0-9a-f]{20,}", text)
    return f"{text[:12]}…" if is_hash else text


MATCHING = (
    same_protocol,
    same_prompts,
    same_checkpoint,
    same_code,
    same_packages,
    same_hardware,
    same_hardware_learning,
    interleaved,
    same_nodes,
    conformance,
    nothing_beyond,
    nothing_removed,
    plan_as_frozen,
)
