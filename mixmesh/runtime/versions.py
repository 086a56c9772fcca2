"""The versions that must be the same on all ranks."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ..base.files import PACKAGE


@cache
def versions_text() -> str:
    """The versions of PyTorch, Python and mixmesh, with a digest of mixmesh's own files: two copies of a
    source tree have one number and may still differ."""
    return f"torch {torch.__version__}, Python {python_version()}, mixmesh {package_version()}"


def python_version() -> str:
    """Python's version without the patch number, which changes no interface."""
    return ".".join(platform.python_version_tuple()[:2])


@cache
def package_version() -> str:
    """The version of mixmesh, with a digest of its own files."""
    try:
        number = version("mixmesh")
    except PackageNotFoundError:  # run from a source tree that is not installed
        number = "not installed"
    return f"{number}, digest {source_digest(PACKAGE)}"


def source_digest(folder: Path) -> str:
    """12 hex digits of the names and contents of all Python files in ``folder`` and below."""
    hasher = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        hasher.update(f"{path.relative_to(folder)}\0".encode())
        hasher.update(hashlib.sha256(path.read_bytes()).digest())
    return hasher.hexdigest()[:12]
