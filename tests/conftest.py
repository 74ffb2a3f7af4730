"""Shared by all tests. Importing the package first lets torchvision import beside a CPU torch (molt_core/_torchvision.py)."""

import molt_core  # noqa: F401
