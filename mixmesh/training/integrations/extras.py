"""Checks for libraries that only some integrations need."""

from __future__ import annotations

import importlib

from ...errors import InputError


def require(user: str, modules: tuple[str, ...], expected: str, install: str) -> None:
    """Raises InputError, with the command ``install`` as a hint, unless the modules that ``user`` needs can
    be imported."""
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        needed = " and ".join(module.partition(".")[0] for module in modules)
        raise InputError(
            f"{user} needs {needed}", expected=expected, got=str(error), hint=f"pip install {install}"
        ) from error
