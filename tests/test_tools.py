"""What make targets say where something is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_pictures_need_a_browser(tmp_path):
    """``make report-shots`` fails where there is no Chromium, and says what to type."""
    command = [sys.executable, "-m", "tools.browser"]
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "this needs Chromium, and there is none here: apt-get install chromium\n"


def test_pictures_are_made_after_it_is_asked_for():
    recipe = (ROOT / "Makefile").read_text().partition("report-shots:")[2].partition("\n\n")[0]
    assert recipe.splitlines()[1].strip() == "$(BIN)/python -m tools.browser"
