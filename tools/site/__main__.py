"""Builds the site: ``python -m tools.site [FOLDER]``. Warnings are errors."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.cmd.build import build_main

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def build(target: Path, *options: str) -> int:
    """Writes the site into ``target`` and returns 0 if nothing was wrong with any page."""
    doctrees = target.with_name(target.name + "-doctrees")
    paths = ("-c", str(HERE), "-d", str(doctrees), str(ROOT / "docs"), str(target))
    return build_main(["-q", "-W", "--keep-going", "-n", *options, *paths])


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "out" / "site")
    status = build(folder)
    if status == 0:
        print(f"open {folder / 'index.html'}")
    sys.exit(status)
