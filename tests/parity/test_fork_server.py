"""A forked process is what a fresh one would be, but for the seconds that its imports take."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fork_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are started as ever")

IS_FORKED = "import sys; print('torch' in sys.modules)"


def plain_environment():
    return {**fork_server._fixed(fork_server._ENVIRONMENT), "PATH": os.environ["PATH"]}


def python(*arguments, **options):
    return fork_server.run(
        [sys.executable, *arguments], **{"env": plain_environment(), "capture_output": True, "text": True, **options}
    )


def test_it_has_what_it_is_given_and_nothing_else(tmp_path):
    module = tmp_path / "site" / "told.py"
    module.parent.mkdir()
    module.write_text(
        "import json, os, sys, threading\n"
        "print(json.dumps([__name__, sys.argv[1:], os.getcwd(), dict(os.environ), os.getppid(), sys.stdin.read(),\n"
        "    threading.active_count(), 'torch' in sys.modules]))\n"
        "print('beside', file=sys.stderr)"
    )
    environment = {**plain_environment(), "PYTHONPATH": str(module.parent), "OF_ITS_OWN": "ü"}

    for program in (["-m", "told"], [str(module)], ["-P", "-m", "told"], ["-c", module.read_text()]):
        done = python(*program, "a", "b c", cwd=tmp_path, env=environment, input="typed")

        assert (done.returncode, done.stderr) == (0, "beside\n")
        here = str(tmp_path), environment, os.getpid(), "typed", 1, True
        assert json.loads(done.stdout) == ["__main__", ["a", "b c"], *here]


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import atexit, sys; atexit.register(print, 'last', file=sys.stderr); sys.exit(3)", 3, "last\n"),
        ("import sys, weakref; weakref.finalize(sys, print, 'gone', file=sys.stderr)", 0, "gone\n"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_it_ends_as_it_says(program, code, said):
    done = python("-c", program)

    assert done.returncode == code
    assert done.stderr.endswith(said)
    assert bool(done.stderr) == bool(said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_it_is_a_child_to_signal_and_to_wait_for(number):
    with fork_server.Popen(
        [sys.executable, "-c", "import time; print('on', flush=True); time.sleep(60)"],
        env=plain_environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout.readline() == "on\n"
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
        os.killpg(process.pid, number)

        assert process.wait(timeout=30) == -number


def test_files_that_are_passed_on_keep_their_numbers():
    reading, writing = os.pipe()
    with os.fdopen(reading) as said, os.fdopen(writing, "w") as ours:
        python("-c", f"import os; os.write({writing}, b'through a pipe')", pass_fds=[writing])
        ours.close()
        assert said.read() == "through a pipe"


def test_a_folder_that_is_not_there_is_an_error_here(tmp_path):
    with pytest.raises(FileNotFoundError):
        python("-c", "", cwd=tmp_path / "nowhere")


def test_what_fails_or_takes_too_long_is_raised():
    with pytest.raises(subprocess.CalledProcessError):
        python("-c", "raise SystemExit(2)", check=True)
    with pytest.raises(subprocess.TimeoutExpired):
        python("-c", "import time; time.sleep(60)", timeout=0.2)


def test_chance_is_not_shared():
    program = "import random, numpy; print(random.random(), numpy.random.rand())"

    said = [python("-c", program).stdout.split() for _ in range(2)]

    assert {*said[0]}.isdisjoint(said[1])


def test_sets_have_other_orders_on_the_next_rank():
    program = "import sys; print(list(map(str, range(20))), [*set(map(str, range(20)))], 'torch' in sys.modules)"

    first, second = (python("-c", program, env={**plain_environment(), "RANK": str(rank)}).stdout for rank in range(2))

    assert first.endswith("True\n")
    assert second.endswith("True\n")
    assert first != second


@pytest.mark.parametrize(
    ("arguments", "more", "is_forked"),
    [
        ([], {}, True),
        ([], {"MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "1", "TORCHINDUCTOR_CACHE_DIR": "/tmp"}, True),
        ([], {"KMP_INIT_AT_FORK": "FALSE", "KMP_DUPLICATE_LIB_OK": "True"}, True),
        (["-I"], {}, False),
        ([], {"PYTHONHASHSEED": "1"}, False),
        ([], {"OMP_NUM_THREADS": "2"}, False),
        ([], {"MALLOC_ARENA_MAX": "1"}, False),
        ([], {"TORCH_LOGS": "dynamo"}, False),
        ([], {"TRITON_INTERPRET": "1"}, False),
        ([], {"LD_PRELOAD": ""}, False),
    ],
)
def test_one_that_is_told_something_before_its_first_line_is_started(arguments, more, is_forked):
    done = python(*arguments, "-c", IS_FORKED, env={**plain_environment(), **more})

    assert done.stdout == f"{is_forked}\n", done.stderr


def test_what_stops_forking_is_named(monkeypatch):
    assert fork_server.changed_since_start() == {}
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert fork_server.changed_since_start() == {"MALLOC_ARENA_MAX": "1"}


@pytest.mark.parametrize(("name", "is_forked"), [("sitecustomize", False), ("numpy", False), ("acme", True)])
def test_one_with_modules_in_place_of_those_it_would_import_is_started(tmp_path, name, is_forked):
    (tmp_path / f"{name}.py").touch()

    done = python("-c", IS_FORKED, env={**plain_environment(), "PYTHONPATH": str(tmp_path)})

    assert done.stdout == f"{is_forked}\n", done.stderr


def test_what_a_command_starts_is_forked_from_it(tmp_path):
    """As ranks are by their launcher, which is their parent and the only one to end them."""
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme-1.0.dist-info").mkdir()
    (tmp_path / "acme-1.0.dist-info/entry_points.txt").write_text("[forge.v1]\nacme = acme.plugin\n")
    (tmp_path / "acme/plugin.py").write_text(
        "from forge_core.api import Command, hookimpl\n"
        "@hookimpl\n"
        "def forge_commands():\n"
        "    yield Command(name='acme', summary='-', run='acme.commands:start')\n"
    )
    (tmp_path / "acme/commands.py").write_text(
        "import os, subprocess, sys, click\n"
        'CHILD = \'import os, sys; print(os.getppid(), "torch" in sys.modules, os.environ["RANK"])\'\n'
        "@click.command()\n"
        "def start():\n"
        "    environment = {**os.environ, 'RANK': '1'}\n"
        "    done = subprocess.run([sys.executable, '-c', CHILD], env=environment, capture_output=True, text=True)\n"
        "    print(os.getpid(), done.stdout)\n"
    )

    done = python("-m", "forge_core", "acme", env={**plain_environment(), "PYTHONPATH": str(tmp_path)})

    parent, childs_parent, is_forked, rank = done.stdout.split()
    assert (childs_parent, is_forked, rank) == (parent, "True", "1")


def test_it_ends_with_whoever_has_started_it():
    """Of its own accord, and not because a launcher tells it to."""
    starter = (
        "import sys, time, fork_server\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        f"process = fork_server.Popen(sleeper, env={plain_environment()!r})\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(60)"
    )
    environment = {**plain_environment(), "PYTHONPATH": str(Path(fork_server.__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", starter], env=environment, stdout=subprocess.PIPE) as process:
        handle = os.pidfd_open(int(process.stdout.readline()))
        process.kill()

    assert select.select([handle], [], [], 30)[0]
    os.close(handle)


def test_a_test_session_is_forked_with_its_ranks_and_what_it_looks_into_is_not(tmp_path):
    """Kits start ranks, and a process to see what it imports."""
    (tmp_path / "test_it.py").write_text(
        "import subprocess, sys\n"
        "from forge_testing import several_ranks\n"
        "def test_it(capfd):\n"
        "    assert 'torch' in sys.modules\n"
        f"    program = [sys.executable, '-c', {IS_FORKED!r}]\n"
        "    for start in (several_ranks.Popen, subprocess.Popen):\n"
        "        assert start(program).wait() == 0\n"
        "    assert capfd.readouterr().out.split() == ['True', 'False']\n"
        "    import fork_server\n"
        "    assert [*fork_server._servers] == [(sys.executable, fork_server._INHERITED)]\n"
    )
    environment = {**plain_environment(), "PYTHONPATH": str(Path(fork_server.__file__).parent)}
    options = ["-q", "-p", "no:cacheprovider", "-p", "forked_ranks", "--rootdir=."]

    done = python("-m", "pytest", *options, "test_it.py", cwd=tmp_path, env=environment)

    assert done.returncode == 0, done.stdout
