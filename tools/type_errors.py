"""Types: ``python -m tools.type_errors`` runs mypy over the package, in which it is to find nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.exit(subprocess.call([sys.executable, "-m", "mypy"], cwd=Path(__file__).parents[1]))
