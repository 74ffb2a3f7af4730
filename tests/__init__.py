"""Importing the package first lets torchvision import beside a CPU torch (molt_core/_torchvision.py), in tests as well."""

import molt_core  # noqa: F401
