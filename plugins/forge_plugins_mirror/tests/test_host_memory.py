"""Which checkpoints in memory count, and what cannot be set. Runs are in ``tests/system/test_host_memory.py``."""

import json
import math

import pytest

from forge_core.errors import ConfigError
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_mirror.host_memory.history import FILE_NAME, History
from forge_plugins_mirror.host_memory.node import NodeFolder, Nodes


def test_steps_count_up_to_where_a_later_stretch_goes_on(tmp_path):
    history = History.new(tmp_path)
    for step in (-1, 20, 10, 30):
        history = history.going_on_from(step, "a")

    first, second, third, last = (name for name, _ in history.stretches)
    assert history.last_steps() == {first: 10, second: 10, third: 30, last: math.inf}
    assert history.stretch == last


def test_a_history_is_read_as_it_was_written_and_by_its_own_run_alone(tmp_path):
    run, branch = tmp_path / "run", tmp_path / "branch"
    for folder in (run, branch):
        folder.mkdir()
    history = History.new(run).going_on_from(-1, "a")
    assert History.read(run) is None

    history.write()
    (branch / FILE_NAME).write_text((run / FILE_NAME).read_text())

    assert History.read(run) == history
    assert History.read(branch) is None


@pytest.mark.parametrize(
    "broken",
    [
        {"folder": "../other"},
        {"folder": ".."},
        {"folder": "somebody's"},
        {"stretches": [["../x", 1]]},
        {"stretches": [["x", math.inf]]},
        {"stretches": [["x"]]},
        {"stretches": None},
        {"directory": "/elsewhere"},
    ],
)
def test_a_history_that_leads_elsewhere_is_none(tmp_path, broken):
    History.new(tmp_path).going_on_from(-1, "a").write()
    known = json.loads((tmp_path / FILE_NAME).read_text())
    (tmp_path / FILE_NAME).write_text(json.dumps({**known, **broken}))

    assert History.read(tmp_path) is None


def test_a_start_without_memory_ends_what_may_be_gone_on_from(tmp_path):
    history = History.new(tmp_path).going_on_from(-1, "first").going_on_from(20, "second")
    assert not history.has_last_start()

    def writes(*events):
        with (tmp_path / "events.jsonl").open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)

    writes({"event": "started", "attempt": "first"}, {"event": "rolled_back", "attempt": 1})
    assert history.has_last_start()  # the second one was killed before it trained
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "resumed", "attem\n')
    writes({"event": "resumed", "attempt": "second"}, {"event": "saved", "step": 30})
    assert history.has_last_start()

    writes({"event": "resumed", "attempt": "third"})

    assert not history.has_last_start()


def test_a_start_leaves_one_checkpoint_so_that_there_is_room_for_another(tmp_path):
    folder = NodeFolder(str(tmp_path), "forge-x")
    for place in ("a-0/step_00000010", "a-0/.step_00000030.memory.partial", "b-1/step_00000020", "c-2/step_00000020"):
        (folder.path / place).mkdir(parents=True)
        (folder.path / place / "file").touch()
    (folder.path / "b-1" / "step_00000010").mkdir()
    (folder.path / "b-1" / ".step_00000030.memory.partial").mkdir()

    folder.keep_only(["a-0", "b-1"], 20)

    assert sorted(path.relative_to(folder.path).as_posix() for path in folder.path.rglob("*")) == [
        "b-1",
        "b-1/step_00000020",
        "b-1/step_00000020/file",
    ]


def test_a_history_behind_a_link_is_none(tmp_path):
    History.new(tmp_path).going_on_from(-1, "a").write()
    (tmp_path / FILE_NAME).rename(tmp_path / "other.json")
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "other.json")

    assert History.read(tmp_path) is None


def test_each_rank_sends_to_the_next_node_also_where_nodes_have_other_numbers_of_ranks():
    nodes = Nodes(((0, 3), (1,), (2, 4, 5)), 4)

    assert [nodes.copier_of(rank) for rank in range(6)] == [1, 2, 0, 1, 3, 0]
    assert (nodes.number, nodes.place, nodes.leads, nodes.before(0)) == (2, 1, False, 2)


def test_a_folder_of_others_or_behind_a_link_is_refused(tmp_path):
    folder = NodeFolder(str(tmp_path), "forge-x")
    folder.make()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.path.rename(tmp_path / "real")
    folder.path.symlink_to(tmp_path / "real")

    with pytest.raises(ConfigError, match="is not a folder that this user alone can write to"):
        folder.make()


JOB = """
[model]
name = "transformer"
dim = 16
n_layers = 1
n_heads = 2
[data]
name = "text_files"
path = "."
[train]
steps = 100
seq_len = 8
[optimizer]
name = "adamw"
lr = 1e-3
[checkpoint]
interval = 50
mirror = {name = "host_memory"}
"""


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("checkpoint.mirror.every=50", "50 must be less than checkpoint.interval = 50, at which a run saves anyway"),
        ("checkpoint.mirror.every=0", "checkpoint.mirror.every"),
        ("checkpoint.mirror.evry=3", "every"),
        ("checkpoint.mirror.folder=shm", "checkpoint.mirror.folder: 'shm' is no absolute path; name a folder in the"),
        ("checkpoint.mirror_keep_last=3", "checkpoint.mirror_keep_last has no effect; remove it"),
    ],
)
def test_what_would_do_nothing_is_refused(tmp_path, setting, sentence):
    (tmp_path / "job.toml").write_text(JOB)

    with pytest.raises(ConfigError) as refusal:
        load_job(tmp_path / "job.toml", [setting], catalog=discover())

    assert sentence in str(refusal.value)


def test_a_run_that_ends_before_anything_is_kept_is_refused(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)

    with pytest.raises(ConfigError, match=r"10 must be less than train\.steps = 10, at which a run saves anyway"):
        load_job(tmp_path / "job.toml", ["train.steps=10", "checkpoint.interval=0"], catalog=discover())
