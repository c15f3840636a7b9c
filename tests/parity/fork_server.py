"""Processes that begin with torch and Forge imported: a rank then costs a tenth of a second, not three.

``Popen`` and ``run`` are those of ``subprocess``, for a test that starts Python programs. Their children are real: they
have numbers, signals and exit codes of their own, and this process is their parent. A server that has done the imports
forks them. Started as a script, this module is that server.

A fork cannot stand for every process. One of another interpreter is started as ever, and so is one that is told
something before its first line: by ``sitecustomize``, ``LD_PRELOAD``, ``PYTHONHASHSEED``. A test of how processes start
takes ``subprocess`` itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_FIXED = ("CUDA_", "GLIBC_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH", "TRITON_")
"""Beginnings of the names of variables that are read while a process starts, or while it imports torch."""
_READ_LATER = ("PYTHONFAULTHANDLER", "PYTHONPATH", "TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR", "TORCH_GLOO_LAZY_INIT")
_READ_LATER += ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
"""Of those, the exceptions. Libraries set the last ones themselves: torch in a process that trains, scikit-learn in one
that imports it. A test process that once has them would fork nothing from then on."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # Linux, sys/prctl.h
_SECONDS = 250.0
"""In which a server answers, on the busiest machine."""

Subprocess = subprocess.Popen
"""As it is there, when ``Popen`` has been put in its place."""
_start_subprocess = Subprocess._execute_child
_PARAMETERS = inspect.signature(_start_subprocess)


class Popen(subprocess.Popen):
    """As in ``subprocess``; what can be forked is."""

    def _execute_child(self, args: Any, *more: Any) -> None:
        given = _PARAMETERS.bind(self, args, *more).arguments
        server = _server_for(given)
        if server is None:
            _start_subprocess(self, args, *more)
            return
        places = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
        places = {place: own if own >= 0 else place for place, own in places.items()}
        places |= {one: one for one in given["pass_fds"]}
        order = {
            "command": [os.fsdecode(one) for one in args],
            "environment": _environment(given),
            "folder": os.fsdecode(given["cwd"] or os.getcwd()),  # noqa: PTH109
            "places": [*places],
            "session": given["start_new_session"],
            "parent": os.getpid(),
            "dies_with_parent": (sys.executable, _INHERITED) not in _servers,
        }
        try:
            self.pid = server.fork(order, [*places.values()])
        finally:
            ours = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
            self._close_pipe_fds(*ours)
        self._child_created = True


def run(
    command: Sequence[Any],
    *,
    input: Any = None,  # noqa: A002 - as it is called in subprocess
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As in ``subprocess``."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class _Server:
    """This process' end of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SECONDS)
        self._connection = connection
        self._lock = threading.Lock()
        imported, path = _receive(connection)[0]
        self.imported = frozenset(imported)
        """Names of packages that are imported already."""
        self.path = frozenset(path)
        """Where it has found them."""

    def fork(self, order: Mapping[str, Any], files: Sequence[int]) -> int:
        """Returns the number of a process that is a child of this one from its first line on."""
        with self._lock, _adopting():
            _send(self._connection, order, files)
            number, error = _receive(self._connection)[0]
        if error is not None:
            os.waitpid(number, 0)
            raise OSError(*error)
        return int(number)


_servers: dict[tuple[str, int], _Server] = {}
"""By interpreter and number."""
_pythons = {sys.executable}
_starting = threading.Lock()


def serve(python: str | Path) -> None:
    """Fork programs of another environment as well, by servers that import what is installed there."""
    _pythons.add(str(python))


def _server_for(given: Mapping[str, Any]) -> _Server | None:
    """The server that can do it, if one can.

    Two servers take turns by the parity of ranks, so that sets of strings differ in their order from rank to rank, as
    they do among processes that have nothing in common.
    """
    environment = _environment(given)
    if sys.platform != "linux" or not _is_plain(given) or _program(given["args"]) is None:
        return None
    if _fixed(environment) != _fixed(_ENVIRONMENT):
        return None
    python, rank = os.fsdecode(given["args"][0]), environment.get("RANK", "0")
    with _starting:
        inherited = (python, _INHERITED) in _servers
        which = int(rank) % 2 if rank.isdecimal() and not inherited else _INHERITED
        server = _servers.get((python, which)) or _started(python, which)
    for entry in {*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))} - server.path:
        names = {path.name.partition(".")[0] for path in Path(entry).iterdir()} if Path(entry).is_dir() else set()
        if names & (server.imported | {"sitecustomize", "usercustomize"}):
            return None
    return server


_INHERITED = -1
"""The only server of a process that a server has forked."""
_ENVIRONMENT: dict[str, str] = {}
"""A server's, from before any test has changed this process'."""


def take_environment() -> None:
    """Give servers the environment that this process has now. It is done once at import, and again by the suite: a
    ``conftest.py`` may be imported before the machine that tests see is made."""
    _ENVIRONMENT.clear()
    _ENVIRONMENT.update({name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    _ENVIRONMENT["OMP_NUM_THREADS"] = "1"


take_environment()


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Nothing is asked for that a fork does not do."""
    unusual = ("executable", "preexec_fn", "shell", "gid", "gids", "uid")
    return (
        not any(given[name] for name in unusual if given[name] is not None)
        and given["umask"] < 0
        and given["process_group"] < 0
        and not isinstance(given["args"], str | bytes | os.PathLike)
    )


def _environment(given: Mapping[str, Any]) -> dict[str, str]:
    env = os.environ if given["env"] is None else given["env"]
    return {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_FIXED) and not name.startswith(_READ_LATER)
    }


def changed_since_start() -> dict[str, str]:
    """Variables of this process that no server has, and because of which it forks nothing."""
    own = {**_fixed(_environment({"env": None})), "OMP_NUM_THREADS": "1"}  # which tests say themselves
    return dict(own.items() ^ _fixed(_ENVIRONMENT).items())


def _program(command: Sequence[Any]) -> tuple[str, str, list[str]] | None:
    """``-m``, ``-c`` or ``file``, what follows, and its arguments; ``None`` if it is no program in Python."""
    python, *rest = map(os.fsdecode, command)
    if python not in _pythons or not rest:
        return None
    if rest[0] == "-P" and rest[1:2] == ["-m"]:
        rest = rest[1:]
    if rest[0] in ("-m", "-c") and len(rest) > 1:
        return rest[0], rest[1], rest[2:]
    return None if rest[0].startswith("-") else ("file", rest[0], rest[1:])


def _started(python: str, which: int) -> _Server:
    ours, its = socket.socketpair()
    with its:
        process = Subprocess(
            [python, __file__, str(its.fileno())],
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
            cwd="/",
        )
    server = _servers[python, which] = _Server(ours)

    def end() -> None:
        ours.close()
        process.wait(_SECONDS)

    atexit.register(end)
    return server


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Meanwhile a process whose parent ends becomes a child of this one, if it is further below it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _send(connection: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    text = json.dumps(message).encode()
    socket.send_fds(connection, [len(text).to_bytes(8)], [*files])
    connection.sendall(text)


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Raises ``EOFError`` when the other end is closed."""
    length, files, *_ = socket.recv_fds(connection, 8, 64)
    if not length:
        raise EOFError
    left, text = int.from_bytes(length), b""
    while left > len(text):
        text += connection.recv(left - len(text))
    return json.loads(text), files


# -- in a server


def _import_everything() -> None:
    import forge_core.commands.run
    import forge_core.run.run  # noqa: F401
    from forge_core.distributed.installed import installed_observers
    from forge_core.registry.discovery import discover
    from forge_plugins_monitor.schema import job_schema

    catalog = discover()
    for plugin in catalog.plugins:
        for _, component in plugin.components:
            for reference in filter(None, (component.factory, component.config)):
                module = reference.partition(":")[0]
                if not module.startswith(_DEAR):
                    importlib.import_module(module)
    job_schema(catalog)  # resolves the types of keys
    installed_observers(catalog)  # reads the signatures of those


_DEAR = (
    "forge_plugins_hf.harness",
    "forge_plugins_hf.lmms",
    "forge_plugins_parallel.fp8",
    "forge_plugins_torchft",
    *(f"forge_plugins_monitor.{name}_tracker" for name in ("mlflow", "tensorboard", "wandb")),
)
"""Modules that import further libraries, which hardly a test needs, and which may start threads."""


def _serve(connection: socket.socket, path: Sequence[str]) -> dict[str, Any]:
    """Returns in each process that it forks, with the order for it, and never in this one."""
    _send(connection, (_imported(), path))
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the others of the terminal
    while True:
        try:
            order, files = _receive(connection)
        except (EOFError, ConnectionError):
            os._exit(0)
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)  # the child that it leaves goes to who has asked for it
            signal.signal(signal.SIGINT, interrupt)
            own_server = _become(order, files, connection)
            if own_server is None:
                return order
            connection = own_server
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _send(connection, (_imported(), path))
            continue
        os.waitpid(between, 0)
        for file in files:
            os.close(file)


ALREADY = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
"""For ``-W`` of a forked pytest: its plugins are among what is imported."""
_NAME = "fork_server"
"""Of this module, for what is forked and imports it: it shall have the server that is there already."""


def _imported() -> list[str]:
    assert len(os.listdir("/proc/self/task")) == 1, "no process of several threads may be forked"  # noqa: PTH208
    return sorted({name.partition(".")[0] for name in sys.modules} - {_NAME})


def _become(order: Mapping[str, Any], files: Sequence[int], connection: socket.socket) -> socket.socket | None:
    """Take over all that a process is given when it is started, and answer.

    Returns:
        In a server for what this process will start: whom it serves.
    """
    deadline = time.monotonic() + _SECONDS
    while os.getppid() != order["parent"] and time.monotonic() < deadline:
        time.sleep(0.001)
    error = None
    try:
        os.chdir(order["folder"])
    except OSError as failed:
        error = failed.args
    if order["session"]:
        os.setsid()
    _open_at(order["places"], files)
    os.environ.clear()
    os.environ.update(order["environment"])
    if "RANK" not in os.environ:  # it may start ranks
        ours, its = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            connection.close()
            _open_nothing_at(order["places"])
            return its
        its.close()
        _servers[sys.executable, _INHERITED] = _Server(ours)
        subprocess.Popen = Popen  # type: ignore[misc]  # for what starts ranks
    if order["dies_with_parent"]:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _send(connection, (os.getpid(), error))
    connection.close()
    if error is not None:
        os._exit(127)
    return None


def _open_at(places: Sequence[int], files: Sequence[int]) -> None:
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for file in files]
    for file in files:
        os.close(file)
    for place, file in zip(places, high, strict=True):
        os.dup2(file, place)
        os.close(file)


def _open_nothing_at(places: Sequence[int]) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for place in places:
        os.dup2(nothing, place, inheritable=False)
    os.close(nothing)


_ABOVE = 200
"""Numbers of open files from here on are in nobody's way."""


def _forget() -> None:
    """What a process has found out that was not told what this one has been told."""
    import numpy as np

    from forge_core.registry.entry_points import plugin_entry_points

    np.random.seed()
    tempfile.tempdir = None
    importlib.invalidate_caches()
    plugin_entry_points.cache_clear()
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()


def _run(command: Sequence[str], path: Sequence[str]) -> None:
    """As the interpreter does, for whose end this returns or raises.

    Args:
        path: where modules are found without ``PYTHONPATH``.
    """
    program = _program(command)
    assert program is not None
    kind, what, arguments = program
    first = {"-m": [os.getcwd()], "-c": [""], "file": [str(Path(what).parent)]}[kind]  # noqa: PTH109
    own = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*([] if "-P" in command[1:2] else first), *own, *path]
    sys.argv, sys.orig_argv = [what if kind == "file" else kind, *arguments], [*command]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "file":
        runpy.run_path(what, run_name="__main__")
    else:
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)


def _exit_code(command: Sequence[str], path: Sequence[str]) -> int:
    """Run the command. Returns the code with which the interpreter would exit, having said why."""
    try:
        _run(command, path)
    except KeyboardInterrupt:
        raise
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:  # noqa: BLE001 - shown as the interpreter shows it
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """As the interpreter ends, but without taking apart what was imported: that writes to each page that is shared with
    the server, and so copies 200 MB."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _main() -> None:
    del sys.path[0]
    path = [*sys.path]
    sys.modules[_NAME] = sys.modules["__main__"]
    given = socket.socket(fileno=int(sys.argv[1]))
    connection = socket.socket(fileno=fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, _ABOVE))
    given.close()
    _import_everything()
    for library in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # there is no other list of them
        library.atexit = False  # torch's, which would take operators apart as each process ends
    gc.disable()
    gc.freeze()
    order = _serve(connection, path)
    gc.enable()
    _forget()
    try:
        _end(_exit_code(order["command"], path))
    except KeyboardInterrupt:
        # Python forgets that it was interrupted where a library evaluates text as it ends, as transformers' do
        traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    _main()
