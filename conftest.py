"""The machine as tests see it, on every machine on which they run: named commands, named variables, an empty home.

Research packages lie in folders of their own names at the root. pytest names test modules after their folders, so a
package would be hidden by its folder if it were not imported before."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator, MutableMapping
from pathlib import Path

import pytest

import forge_plugins_interp.plugin  # noqa: F401
import forge_plugins_moe  # noqa: F401
import forge_plugins_vlm.plugin  # noqa: F401
from forge_core.errors import ConfigError

COMMANDS = """
basename bash blockdev cat cc chmod chown cp cut date dd df dirname dmsetup echo env false find flock g++ gcc getconf
git grep head hostname id ip kill ld as ln losetup ls make mkdir mkfs.ext4 mkfs.xfs mknod mktemp mount mountpoint mv
nohup nproc nvidia-smi openssl pgrep pidof pkill ps readlink realpath rm rmdir sed seq sh sleep sort stat strace sync
tail tc tee test timeout touch tr true truncate umount uname uniq unshare wc xargs
"""
"""Programs of the machine that tests may start, where it has them. None is of Slurm: tests bring their own."""

VARIABLES = """
CC CI CUDA_HOME CUDA_VISIBLE_DEVICES CXX FORGE_REAL_MODELS FORGE_REQUIRE_SLURM FORGE_TORTURE_SECONDS LANG LC_ALL
LD_LIBRARY_PATH OMP_NUM_THREADS PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED REQUESTS_CA_BUNDLE SSL_CERT_DIR SSL_CERT_FILE
TMPDIR TORCH_STAND_IN_GPU TRITON_INTERPRET TZ VIRTUAL_ENV http_proxy https_proxy no_proxy
"""
"""Variables of the environment that tests may see, where they are set; those of pip and pytest too."""

MADE = "FORGE_TEST_MACHINE"
"""Set where the machine is made already: in the workers of pytest-xdist."""


def pytest_configure(config: pytest.Config) -> None:
    """Runs before any test is imported."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:  # as a shell does for what it starts in the background
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if MADE not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="forge-tests-"))
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        make_machine(folder, os.environ)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the crashes of compiled code after which a run was done once more."""
    crashes = Path(os.environ[MADE]) / "crashes"
    if crashes.exists():
        terminalreporter.section("crashes of compiled code")
        terminalreporter.write_line(crashes.read_text())


def pytest_collection(session: pytest.Session) -> None:
    """Look for no garbage while tests are collected: they stay until the end."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Nor look for it, ever, in what has been collected."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked ``gpu`` where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch  # most tests do without

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that fails because this torch is refused as too old."""
    report = yield
    if report.failed and call.excinfo is not None and (sentence := refusal_of_torch(call.excinfo.value)):
        line = (item.location[1] or 0) + 1
        report.outcome, report.longrepr = "skipped", (str(item.path), line, f"Skipped: {sentence}")
    return report


def refusal_of_torch(error: BaseException) -> str | None:
    """Return the sentence by which Forge refuses this torch as too old, if the error is that, or shows what processes
    have said and one of them has ended with that."""
    if not isinstance(error, ConfigError | AssertionError):
        return None
    from torch import torch_version, version  # most tests do without

    installed = version.__version__  # some tests give ``torch.__version__`` another value
    if torch_version.TorchVersion(installed) >= "2.13":
        return None
    sentence = rf"(?:^|: )(parallel\.\S+: torch {re.escape(installed)} cannot .*; torch 2\.13 can\b.*)$"
    found = re.search(sentence, str(error), re.M)
    return found[1] if found else None


@pytest.fixture(autouse=True, scope="module")
def _runs_of_a_file_give_their_sockets_back() -> Iterator[None]:
    """A run that is over is a cycle of objects with four sockets, and some machines allow a process 1,024.

    What is left is imported code and the like, which need not be searched each time."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _ranks_of_kits_are_forked() -> Iterator[None]:
    """Of packages' own tests too: a kit starts two processes for each component."""
    import fork_server
    from forge_testing import several_ranks

    fork_server.take_environment()  # which is the machine's from now on
    several_ranks.Popen = fork_server.Popen  # type: ignore[misc]
    yield
    changed = fork_server.changed_since_start()
    assert not changed, f"a test or a library has set {changed}: no process was forked from then on"


def make_machine(folder: Path, environment: MutableMapping[str, str]) -> None:
    """Reduces ``environment`` to the named commands and variables, with a home in ``folder`` that is empty."""
    commands, home = folder / "bin", folder / "home"
    commands.mkdir()
    home.mkdir()
    for name in COMMANDS.split():
        if found := shutil.which(name, path=environment.get("PATH")):
            (commands / name).symlink_to(found)
    settings = Path(environment.get("HOME", "/")) / ".config/pip/pip.conf"
    kept = VARIABLES.split()
    for name in list(environment):
        if name not in kept and not name.startswith(("PIP_", "PYTEST_")):
            del environment[name]
    if settings.is_file():  # says where packages come from
        environment.setdefault("PIP_CONFIG_FILE", str(settings))
    environment.update({"PATH": str(commands), "HOME": str(home), MADE: str(folder)})
    (folder / "variables").write_text("\n".join(environment))
