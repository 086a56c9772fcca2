"""An error that a script does not catch is printed without the frames of libraries."""

import os
import subprocess
import sys

SCRIPT = """
import mixmesh

def cluster():
    return mixmesh.Cluster.parse("name = 5")

def main():
    {body}

main()
"""
FRAMES = ["main()", "cluster()", 'return mixmesh.Cluster.parse("name = 5")']


def printed(tmp_path, body: str, **environment: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(body=body))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 1
    return done.stderr


def frames(text: str) -> list[str]:
    """The lines of code of the frames in a traceback."""
    lines = text.splitlines()
    return [lines[n + 1].strip() for n, line in enumerate(lines) if line.startswith("  File ")]


def test_only_the_script_s_frames_are_printed(tmp_path):
    text = printed(tmp_path, "cluster()")
    assert frames(text) == FRAMES
    assert "mixmesh.errors.ClusterError: " in text and "expected" in text
    assert text.endswith("(without the frames of libraries; MIXMESH_DEBUG=1 shows them)\n")


def test_all_frames_are_printed_where_they_are_asked_for(tmp_path):
    text = printed(tmp_path, "cluster()", MIXMESH_DEBUG="1")
    assert frames(text)[:3] == FRAMES and len(frames(text)) > 3
    assert "without the frames" not in text


def test_other_errors_are_printed_as_always(tmp_path):
    text = printed(tmp_path, "import fractions; fractions.Fraction(1, 0)")
    assert text.splitlines()[-1] == "ZeroDivisionError: Fraction(1, 0)"
    assert len(frames(text)) == 3 and "without the frames" not in text
