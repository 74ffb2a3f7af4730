"""Runs at the start of every Python process below an engine (the engine puts this folder on PYTHONPATH).

vLLM starts processes of its own that import torchvision before any plugin of ours is loaded; see ``molt_core/_torchvision.py``.
"""

import molt_core  # noqa: F401
