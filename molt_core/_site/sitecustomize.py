"""Runs at the start of every Python process of a run (the job and the engine put this folder on PYTHONPATH).

vLLM starts processes of its own that import torchvision before any plugin of ours is loaded; see ``molt_core/_torchvision.py``.
"""

from molt_core import _process

_process.begin()
