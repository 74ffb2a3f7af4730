"""molt_core: a compact asynchronous core for agentic reinforcement learning. Start at ``loop.py``."""

from molt_core import _process, _torchvision

_process.check_code()
_torchvision.install()
