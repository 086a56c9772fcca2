"""The table of idioms in the documentation names tests that are there, and every file of tests has a row."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "guide" / "idioms.md"


def test_rows_name_files_that_are_there():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and "`test" in line]
    names = {name for row in rows for name in re.findall(r"`((?:tests/)?test_\w+\.py)`", row.split("|")[-2])}
    missing = [n for n in names if not ((HERE.parents[1] if n.startswith("tests/") else HERE) / n).is_file()]
    assert len(rows) > 40 and not missing, missing
    unnamed = {p.name for p in HERE.glob("test_*.py")} - names - {"test_guide.py"}
    assert not unnamed, unnamed
