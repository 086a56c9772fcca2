"""TRL, which ``make setup`` puts into a folder of its own: with it beside it, every process that imports
transformers imports pandas and pyarrow too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# dill, which datasets uses, takes modules for installed ones by this name
FOLDER = Path(sys.prefix) / "trl" / "site-packages"


def find_trl() -> bool:
    """Makes ``import trl`` work in this process, and returns whether it is available."""
    if importlib.util.find_spec("trl") is None and FOLDER.is_dir():
        sys.path.append(str(FOLDER))
    return importlib.util.find_spec("trl") is not None
