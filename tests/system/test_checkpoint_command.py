"""``forge checkpoint`` on a run that was really made."""

import json
import shutil

import pytest

from forge_core import __version__
from forge_core.cli import main
from forge_core.run.lease import Lease


@pytest.fixture(scope="module")
def kept_run(shared_tiny):
    shared_tiny.completed("run.name=kept", "checkpoint.interval=2")
    return shared_tiny.path("kept")


@pytest.fixture
def run(kept_run, tmp_path):
    return shutil.copytree(kept_run, tmp_path / "run", symlinks=True)


def _flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _steps(run):
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))


def test_list_says_what_there_is_and_why_it_is_kept(run, capsys):
    (run / "job.toml").write_text("[checkpoint]\nkeep_last = 2\nkeep_every = 4\n")

    assert main(["checkpoint", "list", str(run), "--json"]) == 0

    rows = {row["step"]: row for row in json.loads(capsys.readouterr().out)}
    assert {step: row["kept_by"] for step, row in rows.items()} == {
        2: [],
        4: ["keep_every"],
        6: [],
        8: ["keep_last", "keep_every"],
        10: ["keep_last"],
    }
    assert rows[4]["tokens"] == 4 * 4 * 32
    assert rows[4]["bytes"] == sum(
        file.stat().st_size
        for file in (run / "checkpoints/step_00000004").rglob("*")
        if file.is_file() and file.name != "manifest.json"
    )
    assert rows[4]["mesh"]["dp_shard"] == 1
    assert rows[4]["damage"] is None


def test_list_names_damage_that_shows_without_reading(run, capsys):
    (run / "checkpoints/step_00000006/state.json").unlink()

    assert main(["checkpoint", "list", str(run)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["STEP", "2", "4", "6", "8", "10"]
    assert "damaged: state.json is missing" in lines[3]
    assert lines[4].split()[-4:] == ["whole", "all", "are", "kept"]


def test_show_tells_what_is_in_the_newest_whole_one(run, capsys):
    _flip(run / "checkpoints/step_00000010/state.json")
    job = run / "job.toml"
    job.write_text(job.read_text().replace("lr = 0.01", "lr = 0.02"))

    assert main(["checkpoint", "show", str(run)]) == 0

    said = capsys.readouterr()
    assert "step_00000010 cannot be used: the content of state.json" in said.err
    assert "step 8, 1,024 tokens" in said.out
    assert "model: 25 tensors" in said.out
    assert "optimizer: 75 tensors" in said.out
    assert f"forge-plugins-dense {__version__}" in said.out
    assert "the run's job has changed since: optimizer.lr: 0.01 -> 0.02" in said.out


def test_show_names_a_plugin_that_is_not_installed(run, capsys, monkeypatch):
    from forge_plugins_monitor import checkpoints

    monkeypatch.setattr(checkpoints, "_installed", lambda name: None if "dense" in name else __version__)

    assert main(["checkpoint", "show", str(run / "checkpoints/step_00000004")]) == 0

    assert f"forge-plugins-dense {__version__} (not installed)" in capsys.readouterr().out


def test_verify_reads_every_bit_and_names_the_file(run, capsys):
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count(": whole\n") == 5
    file = next((run / "checkpoints/step_00000006").glob("*.distcp"))
    _flip(file)

    assert main(["checkpoint", "verify", str(run)]) == 2
    assert f"step_00000006: the content of {file.name} is not what was written" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(run / "checkpoints/step_00000006")]) == 2
    assert main(["checkpoint", "verify", str(run / "checkpoints/latest")]) == 0


def test_prune_removes_what_the_rules_do_not_keep_and_nothing_that_is_damaged(run, capsys):
    (run / "checkpoints/step_00000002/state.json").unlink()

    assert main(["checkpoint", "prune", str(run), "--keep-last", "2", "--dry-run"]) == 0
    assert _steps(run) == [2, 4, 6, 8, 10]
    assert "would remove step_00000006" in capsys.readouterr().out

    assert main(["checkpoint", "prune", str(run), "--keep-last", "2"]) == 0
    assert _steps(run) == [2, 8, 10]
    assert "left step_00000002, which is damaged" in capsys.readouterr().out


def test_prune_goes_by_the_section_of_the_run(run):
    (run / "job.toml").write_text("[checkpoint]\nkeep_last = 1\nkeep_every = 4\n")

    assert main(["checkpoint", "prune", str(run)]) == 0

    assert _steps(run) == [4, 8, 10]


def test_prune_without_a_rule_removes_nothing(run, capsys):
    assert main(["checkpoint", "prune", str(run)]) == 2

    assert "give --keep-last" in capsys.readouterr().err
    assert len(_steps(run)) == 5


def test_prune_leaves_a_run_alone_that_is_training(run, capsys):
    lease = Lease(run, print)
    try:
        assert main(["checkpoint", "prune", str(run), "--keep-last", "1"]) == 2
    finally:
        lease.give_back()

    assert "another process is training" in capsys.readouterr().err
    assert len(_steps(run)) == 5


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("list", "{} does not exist"),
        ("show", "there is no directory {}"),
        ("verify", "{} does not exist"),
        ("prune", "{} does not exist"),
    ],
)
def test_a_path_without_a_run_is_named(tmp_path, capsys, command, said):
    nowhere = tmp_path / "nowhere"

    assert main(["checkpoint", command, str(nowhere)]) == 2

    assert said.format(nowhere) in capsys.readouterr().err
