"""Programs of tests are forked from a server, tests/warm_python.py."""

import os
import select
import signal
import subprocess

from warm_python import python

LOOK = "import os, time; print(os.getppid(), os.getpid(), flush=True); time.sleep({})"


def test_a_program_and_what_started_it_end_at_once():
    """The server sees both ends in one look, as it did where a launcher killed what had just ended."""
    client = subprocess.Popen([python(), "-c", LOOK.format(60)], stdout=subprocess.PIPE, text=True)
    server, program = map(int, client.stdout.readline().split())
    os.kill(server, signal.SIGSTOP)
    end = os.pidfd_open(program)
    os.kill(program, signal.SIGKILL)
    select.select([end], [], [])
    os.close(end)
    client.kill()
    client.wait()
    os.kill(server, signal.SIGCONT)
    told = subprocess.run([python(), "-c", LOOK.format(0)], capture_output=True, text=True, check=True)
    assert int(told.stdout.split()[0]) == server
