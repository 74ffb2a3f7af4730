"""A class that a configuration names as ``package.module:Class``."""

from __future__ import annotations

import importlib
from typing import Any


def named_class(key: str, name: str, built_in: str) -> Any:
    """What ``name`` says, imported. Raises ValueError that names the configuration's ``key``.

    built_in: the name that the key has besides, for the message.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"{key}: {name!r} is neither {built_in!r} nor 'package.module:Class'")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a user's module raises, the message must name it
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{key}: {name!r} cannot be imported: {reason}") from error
