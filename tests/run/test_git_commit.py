"""The commit that is written beside a run's versions."""

import subprocess

from forge_core.run.directory import git_commit


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_a_checkout_has_a_commit_and_says_whether_files_differ_from_it(tmp_path):
    git(tmp_path, "init")
    assert git_commit(tmp_path) is None  # nothing is committed yet
    file = tmp_path / "model.py"
    file.write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "tag", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()

    assert git_commit(tmp_path) == commit
    file.write_text("22")
    assert git_commit(tmp_path) == f"{commit}-dirty"


def test_no_checkout_and_no_git_are_no_commit(tmp_path, monkeypatch):
    assert git_commit(tmp_path) is None
    assert git_commit(tmp_path / "nowhere") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit(tmp_path) is None
