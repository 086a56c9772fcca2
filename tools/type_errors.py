"""Types: ``python -m tools.type_errors`` runs mypy over the package, and holds it against its list of files.

No file may have errors but those that are listed there, and no more than it says. A file that has fewer fails
too, so that the list only shrinks: ``--update`` writes the numbers that there are now, if none has risen.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED = Path(__file__).with_suffix(".json")
ERROR = re.compile(r"^(mixmesh/[^:]+):\d+: error: ", re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    ran = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    if ran.returncode not in (0, 1):  # mypy itself failed
        sys.stderr.write(ran.stdout + ran.stderr)
        return 1
    counts = Counter(ERROR.findall(ran.stdout))
    allowed = json.loads(ALLOWED.read_text()) if ALLOWED.is_file() else {}
    risen = {path for path, count in counts.items() if count > allowed.get(path, 0)}
    if risen:
        lines = ran.stdout.splitlines(keepends=True)
        sys.stdout.writelines(line for line in lines if line.partition(":")[0] in risen)
        return 1
    if "--update" in arguments:
        ALLOWED.write_text(json.dumps(dict(sorted(counts.items())), indent=1) + "\n")
    elif stale := stale_rows(counts, allowed):
        print(*stale, "fewer than are listed: python -m tools.type_errors --update", sep="\n")
        return 1
    print(f"{counts.total()} errors of mypy in {len(counts)} files, all of them listed")
    return 0


def stale_rows(counts: Mapping[str, int], allowed: Mapping[str, int]) -> list[str]:
    """The files that have become better than the list says."""
    return [
        f"{path}: {counts.get(path, 0)}, not {n}" for path, n in allowed.items() if counts.get(path, 0) < n
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
