"""What was submitted, with nothing left to a default: ``runs/<experiment>/<scale>/<experiment>-<hash8>.lock.yaml``.

The name has the hash of the content, so that a later submit of something else leaves the lock of this one where it is.

It is an experiment file itself: submitting it from the same folder gives the same identities, hence the same runs, also when a
later version has other defaults and when the code has been edited since: its section ``made_with`` names the code, whose copy
lies beside the runs and is taken. Where that cannot be (no copy, another image, an edit of the lock) the submit is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from harness import fingerprints
from harness.expand import Expansion, protocol_of, runs_hash
from harness.experiment_file import MadeWith


def resolved(expansion: Expansion) -> dict[str, Any]:
    """The experiment as one scale resolves it, in the shape of an experiment file."""
    experiment, scale = expansion.experiment, expansion.scale
    data = dict(experiment.document.data)
    first = next(iter(scale.configs.values()))
    patch = dict(data["scales"][scale.name])
    kept = {key: value for key, value in patch.items() if key not in ("protocol", "systems")}
    data["protocol"] = protocol_of(first)
    if experiment.switch is not None:  # each arm sets it
        _remove(data["protocol"], experiment.switch.split("."))
    data["systems"] = {
        name: {**system, "trainer": scale.configs[name].trainer.model_dump(mode="json")}
        for name, system in data["systems"].items()
    }
    resources = scale.resources.model_dump(mode="json")
    data["scales"] = {scale.name: {**kept, "resources": resources}}
    return data


def _remove(section: dict[str, Any], keys: list[str]) -> None:
    for key in keys[:-1]:
        section = section[key]
    section.pop(keys[-1], None)


def write(expansion: Expansion, commit: Mapping[str, Any]) -> Path:
    """Write the lock beside the plan, once; returns where. ``commit``: what ``fingerprints.commit`` says of the project."""
    dirty = " with changes, which are in the code's copy" if commit.get("dirty") else ""
    made_with = MadeWith(
        code=expansion.snapshot.hash,
        runs=runs_hash(expansion.runs),
        commit=f"{commit.get('commit', 'none')}{dirty}",
        packages=fingerprints.packages_hash(fingerprints.packages()),
        image=expansion.image.sha256 if expansion.image is not None else None,
    )
    data = {**resolved(expansion), "made_with": made_with.model_dump(mode="json")}
    text = yaml.safe_dump(data, sort_keys=False, width=120)
    print_ = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = expansion.folder / f"{expansion.experiment.name}-{print_}.lock.yaml"
    if not path.exists():
        path.write_text(text)
    return path
