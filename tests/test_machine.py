"""Tests see of the machine what ``conftest.py`` at the root names, and nothing else."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SLURM = ("sbatch", "scontrol", "sinfo", "squeue", "srun", "scancel")


@pytest.fixture(scope="module")
def machine():
    """The root's conftest as a module of its own: it is imported under no name that could be relied on."""
    described = importlib.util.spec_from_file_location("the_machine_of_tests", ROOT / "conftest.py")
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


def test_the_commands_of_a_test_are_those_that_are_named(machine):
    (folder,) = os.environ["PATH"].split(os.pathsep)

    assert {path.name for path in Path(folder).iterdir()} <= set(machine.COMMANDS.split())
    assert not {*SLURM} & set(machine.COMMANDS.split())


def test_the_variables_of_a_test_are_those_that_are_named(machine):
    """As the machine was made: commands that tests run in this process may have set some since."""
    made = (Path(os.environ[machine.MADE]) / "variables").read_text().splitlines()

    kept = {name for name in made if not name.startswith(("PIP_", "PYTEST_"))}
    assert kept <= {*machine.VARIABLES.split(), machine.MADE, "PATH", "HOME"}


def test_the_home_of_a_test_is_not_that_of_the_user(machine):
    assert Path.home().parent == Path(os.environ[machine.MADE])


@pytest.mark.slow
def test_what_a_login_node_has_and_says_is_not_seen(tmp_path):
    """Tests of what happens without Slurm pass where its commands are installed, in a job, and beside its settings."""
    for name in SLURM:
        (tmp_path / name).write_text("#!/bin/sh\necho slurm_load: Unable to contact slurm controller >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    (home / "cluster.toml").write_text("[")
    login_node = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(home),
        "FORGE_CLUSTER": str(home / "cluster.toml"),
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "nope",
        "COLUMNS": "20",
    }
    chosen = [
        "tests/test_doctor.py::test_the_report_is_a_table_with_what_to_do",
        "tests/test_doctor.py::test_what_is_wrong_is_exit_code_2_and_the_rest_is_looked_at",
        "plugins/forge_plugins_slurm/tests/test_requeue.py",
        (
            "plugins/forge_plugins_slurm/tests/test_slurm_settings.py::"
            "test_the_command_writes_it_once_and_says_where_there_is_no_slurm"
        ),
        "plugins/forge_plugins_slurm/tests/test_submit.py::test_what_cannot_work_is_refused_with_a_sentence",
    ]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
        cwd=ROOT,
        env=login_node,
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert done.returncode == 0, done.stdout + done.stderr
