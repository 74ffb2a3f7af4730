"""What was submitted, with nothing left to a default: ``runs/<experiment>/<scale>/<experiment>.lock.yaml``.

It is an experiment file itself: submitting it from the same folder gives the same identities, hence the same runs, also when a
later version has other defaults. Its head says which code, commit, packages and image it was made with.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from harness import fingerprints
from harness.expand import Expansion, protocol_of


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


def text(expansion: Expansion, commit: Mapping[str, Any]) -> str:
    """The lock file. ``commit``: what ``fingerprints.commit`` says of the project."""
    dirty = " with changes, which are in the code's copy" if commit.get("dirty") else ""
    head = {
        "made": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "from": expansion.experiment.path.name,
        "code": expansion.snapshot.hash,
        "commit": f"{commit.get('commit', 'none')}{dirty}",
        "packages": fingerprints.packages_hash(fingerprints.packages()),
    }
    if expansion.image is not None:
        head["image"] = f"{expansion.image.path} sha256:{expansion.image.sha256}"
    lines = [f"# {key}: {value}" for key, value in head.items()]
    body = yaml.safe_dump(resolved(expansion), sort_keys=False, width=120)
    return "\n".join([*lines, "", body])


def write(expansion: Expansion, commit: Mapping[str, Any]) -> Path:
    """Write the lock beside the plan; returns where."""
    path = expansion.folder / f"{expansion.experiment.name}.lock.yaml"
    path.write_text(text(expansion, commit))
    return path
