"""A Python for tests that start many programs: each is forked from a process that has imported what nearly
all of them import, which takes an interpreter of its own about three seconds of a core.

``python()`` names a file that takes the place of ``sys.executable``, for the ranks that torchrun starts too.
A program there is what it is with ``python``: it has its own arguments, environment, folder, paths and
standard streams, gets the signals that are sent to it (but SIGSTOP), and ends as its status says. It is not
the child of what started it, however, and its imports cost nothing: tests of those take ``sys.executable``.

``python warm_python.py SOCKET CLIENT IMPORTS`` is the server; it ends with its standard input."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRELOADED = (
    "torch", "torch._dynamo", "torch.distributed.run", "torch.distributed.checkpoint", "mixmesh.cli.run",
    "mixmesh.planner", "mixmesh.runtime.train", "mixmesh.training.preparation.start", "tests.warm",
)  # fmt: skip
# variables that a library may have read when it was imported
READ_EARLY = (
    "TORCH_",
    "TORCHINDUCTOR",
    "OMP_",
    "MKL_",
    "PYTHON",
    "LD_",
    "MALLOC",
    "GLIBC",
    "CUDA_",
    "PYTORCH_",
    "HF_",
    "TRANSFORMERS_",
    "ACCELERATE_",
)
READ_LATE = (
    "PYTHONPATH", "PYTHON_EXEC", "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip
CLIENT = '''#!{executable} -SEsI
"""Has the server of tests/warm_python.py run a program, and stands for it: signals and status go through."""
import json, os, signal, socket, sys

FORWARDED = [getattr(signal, f"SIG{{name}}") for name in ("TERM", "INT", "HUP", "USR1", "USR2", "QUIT")]
server = socket.socket(socket.AF_UNIX)
try:
    server.connect({socket!r})
except OSError:  # it has ended
    os.execv({executable!r}, [{executable!r}, *sys.argv[1:]])
signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
ignored = [n for n in FORWARDED if signal.getsignal(n) == signal.SIG_IGN]
request = {{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "ignored": ignored}}
data = json.dumps(request).encode()
socket.send_fds(server, [b"%12d" % len(data)], [0, 1, 2])
server.sendall(data)
answers = server.makefile()
pid = int(answers.readline() or -1)
if pid < 0:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    os.execv({executable!r}, [{executable!r}, *sys.argv[1:]])
for number in FORWARDED:
    signal.signal(number, lambda number, _: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
status = int(answers.readline() or 1)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
'''


@functools.cache
def python(*imports: str) -> str:
    """A file that runs a program as ``sys.executable`` would; the server is started by the first call. With a
    GPU it is that, as CUDA does not survive a fork. For programs that take long to import other modules,
    ``imports``, there is another server, forked from the usual one."""
    if "MIXMESH_TEST_GPU" in os.environ:
        return sys.executable
    folder = tempfile.TemporaryDirectory(prefix="warm-python-")
    address, client = Path(folder.name, "socket"), Path(folder.name, "python")
    client.write_text(CLIENT.format(executable=sys.executable, socket=str(address)))
    client.chmod(0o755)
    server = subprocess.Popen(
        [python() if imports else sys.executable, __file__, str(address), str(client), *imports],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
    )  # fmt: skip
    assert server.stdout.read(1) == b"."

    def end() -> None:
        server.stdin.close()
        server.wait()
        folder.cleanup()

    atexit.register(end)
    return str(client)


@dataclass(frozen=True)
class Request:
    """A program that is to be run, as a client tells it."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    ignored: list[int]

    def can_be_forked(self) -> bool:
        """Whether a fork of this process does the same as a new interpreter."""
        words = [word for word in self.argv if word != "-u"]
        if not words or (words[0].startswith("-") and words[0] not in ("-m", "-c")):
            return False
        own = self.cwd if words[0].startswith("-") else os.path.dirname(os.path.join(self.cwd, words[0]))
        packages = (Path(self.cwd, path, "mixmesh") for path in [own, *self.paths(), *sys.path])
        package = next((path for path in packages if (path / "__init__.py").exists()), ROOT / "mixmesh")
        return package.samefile(ROOT / "mixmesh") and read_early(self.env) == AT_START

    def paths(self) -> list[str]:
        return [path for path in self.env.get("PYTHONPATH", "").split(os.pathsep) if path]


def read_early(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that imports may have read."""
    names = (name for name in environment if name.startswith(READ_EARLY) and name not in READ_LATE)
    return {name: environment[name] for name in names}


AT_START = read_early(os.environ)


class Server:
    """Forks a process for each client, and tells it how that ended."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)
        self._clients: dict[int, tuple[socket.socket, int]] = {}  # by what is the process's: its pidfd

    def serve(self) -> Request | None:
        """In each forked process what it is to run; in this one, None at the end."""
        sys.stdout.write(".")
        sys.stdout.flush()
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == 0:
                    return None
                if key.fileobj is self._listener:
                    if (request := self._accept()) is not None:
                        return request
                elif key.fd in self._clients:
                    self._ended(key.fd)
                elif key.fileobj.fileno() >= 0:  # its process may have ended by the same look
                    self._left(key.fileobj)

    def _accept(self) -> Request | None:
        client, _ = self._listener.accept()
        try:
            request, streams = receive(client)
        except (OSError, ValueError):  # it was killed meanwhile
            client.close()
            return None
        pid = os.fork() if request.can_be_forked() else -1
        if pid == 0:
            self._become(request, streams)
            return request
        for stream in streams:
            os.close(stream)
        tell(client, pid)
        if pid < 0:
            client.close()
            return None
        pidfd = os.pidfd_open(pid)
        self._clients[pidfd] = client, pid
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._selector.register(client, selectors.EVENT_READ)
        return None

    def _become(self, request: Request, streams: list[int]) -> None:
        """Leaves the server's own files, and takes those of the program."""
        for pidfd, (client, _) in self._clients.items():
            os.close(pidfd)
            client.close()
        self._selector.close()
        self._listener.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, max(streams) + 64)
        os.setsid()
        for number in request.ignored:
            signal.signal(number, signal.SIG_IGN)
        # a shell's job in the background, as this server may be, ignores it; its programs need not
        if signal.SIGINT not in request.ignored and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _ended(self, pidfd: int) -> None:
        client, pid = self._clients.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if client.fileno() >= 0:
            self._selector.unregister(client)
            tell(client, os.waitstatus_to_exitcode(status))
            client.close()

    def _left(self, client: socket.socket) -> None:
        """A client was killed, and its process is too."""
        (pid,) = (pid for other, pid in self._clients.values() if other is client)
        os.kill(pid, signal.SIGKILL)
        self._selector.unregister(client)
        client.close()


def receive(client: socket.socket) -> tuple[Request, list[int]]:
    """What a client asks for, and its standard streams. Raises ValueError if it left before all was said."""
    head, streams, _, _ = socket.recv_fds(client, 12, 3)
    try:
        return Request(**json.loads(client.makefile("rb").read(int(head)))), streams
    except ValueError:
        for stream in streams:
            os.close(stream)
        raise


def tell(client: socket.socket, number: int) -> None:
    """Sends a number to a client, which may have been killed."""
    try:
        client.sendall(b"%d\n" % number)
    except OSError:
        pass


def run(request: Request, client: str, paths: list[str]) -> None:
    """Does in this process what ``python`` does with these arguments."""
    os.environ.clear()
    os.environ.update(request.env | {"PYTHON_EXEC": client})
    os.chdir(request.cwd)
    is_unbuffered = "-u" in request.argv[:1] or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if is_unbuffered:
        sys.stdout.reconfigure(write_through=True)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    words = request.argv[1:] if request.argv[0] == "-u" else request.argv
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.path[:] = [*request.paths(), *paths]
    importlib.invalidate_caches()
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])
    elif words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = words
        sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
        main.__file__, main.__cached__ = words[0], None
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


def start(address: str, client: str, *imports: str) -> None:
    """Serves; each forked process runs its program and ends as an interpreter does."""
    folder = os.path.dirname(os.path.abspath(__file__))
    paths = [path for path in sys.path if path not in (str(ROOT), folder)]
    sys.path[:] = [str(ROOT), *paths]
    for name in (*imports, *PRELOADED):
        importlib.import_module(name)
    for name, module in [*sys.modules.items()]:
        if name != "__main__" and str(getattr(module, "__file__", "")).startswith(folder):
            del sys.modules[name]  # what has the same name may be another file there
    for name in ("tests", "torch.distributed.run"):  # the latter is run as a program
        del sys.modules[name]
    for finalizer in weakref.finalize._registry:  # of PyTorch's libraries, 40 ms at each end
        finalizer.atexit = False
    sys.path[:] = paths
    if (request := Server(address).serve()) is not None:
        run(request, client, paths)
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)  # modules are many, and to take them down one by one takes a quarter of a second


if __name__ == "__main__":
    start(*sys.argv[1:])
