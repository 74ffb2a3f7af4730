"""molt_core: a compact asynchronous core for agentic reinforcement learning. Start at ``loop.py``."""

from molt_core import _torchvision

_torchvision.install()
