"""Checkpoints in the memory of two nodes of two ranks each, which are folders here: what is lost, and what is not."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

import fork_server
from forge_core.checkpoint.contents import SampleRange
from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.errors import MirrorError, PluginError
from forge_core.train.trainer import Trainer
from forge_plugins_mirror.host_memory import keeper, mirror
from forge_plugins_mirror.host_memory.keeper import Keeper
from forge_plugins_mirror.host_memory.mirror import HostMemory
from forge_plugins_monitor.observers.optimizer_state import OptimizerState
from rank_ports import free_ports

RANK = Path(__file__).with_name("memory_rank.py")
LAYOUT = ("model.n_layers=1", "train.batch_size=1", "train.global_batch_size=4")
MEMORY = ("checkpoint.mirror.name=host_memory", "checkpoint.mirror.every=3", "checkpoint.mirror.folder=$NODE_MEMORY")


class TwoNodes:
    """A run of the tiny job under a name of its own, and the memory of its nodes."""

    def __init__(self, tiny, name: str) -> None:
        self.tiny, self.name = tiny, name
        self.path = tiny.path(name)
        self.memory = tiny.folder / "memory" / name
        self.said = ""

    def start(self, *overrides: str, killed_at: str = "", nodes: tuple[int, ...] = (0, 0, 1, 1)) -> list[int]:
        """Start a rank on each of ``nodes``, and return the exit codes.

        Args:
            killed_at: a step, and that of the checkpoint in memory that is there by then: ``17:15``.
        """
        port = free_ports()
        processes = []
        for rank, node in enumerate(nodes):
            folder = self.memory / f"node{node}"
            folder.mkdir(parents=True, exist_ok=True)
            place = {"RANK": rank, "WORLD_SIZE": len(nodes), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
            place |= {"NODE_MEMORY": folder, "KILLED_AT": killed_at, "OMP_NUM_THREADS": 1}
            if len(nodes) == 1:
                place = {key: value for key, value in place.items() if key not in ("RANK", "WORLD_SIZE")}
            command = [sys.executable, str(RANK), "run", str(self.tiny.config), f"run.name={self.name}"]
            processes.append(
                fork_server.Popen(
                    [*command, *LAYOUT, *overrides],
                    env={**os.environ, **{key: str(value) for key, value in place.items()}},
                    stdout=fork_server.subprocess.PIPE,
                    stderr=fork_server.subprocess.STDOUT,
                    text=True,
                )
            )
        said = [process.communicate(timeout=240)[0] for process in processes]
        self.said = "\n".join(said)
        return [process.returncode for process in processes]

    def kept(self, node: int) -> Path:
        """The only checkpoint in the memory of a node."""
        (found,) = (self.memory / f"node{node}").glob("forge-*/*/step_*")
        return found

    def wipe(self, node: int) -> None:
        shutil.rmtree(self.memory / f"node{node}")

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def began(self) -> list[int]:
        """The steps from which starts have gone on."""
        events = [json.loads(line) for line in (self.path / "events.jsonl").read_text().splitlines()]
        return [event["step"] for event in events if event["event"] in ("started", "resumed")]

    def tensors(self) -> dict[str, torch.Tensor]:
        checkpoint = open_checkpoint(self.path / "checkpoints" / "step_00000010")
        return {key: checkpoint.read(key) for key in checkpoint.saved_tensors()}


@pytest.fixture(scope="module")
def straight(shared_tiny):
    """Never interrupted, and without memory."""
    run = TwoNodes(shared_tiny, "straight")
    assert run.start("parallel.dp_shard=4") == [0] * 4, run.said
    return run


@pytest.fixture(scope="module")
def killed(shared_tiny):
    """Killed in step 8, with the checkpoint of step 5 on the disk and that of step 6 in memory."""
    run = TwoNodes(shared_tiny, "killed")
    codes = run.start("parallel.dp_shard=4", "checkpoint.interval=5", *MEMORY, killed_at="8:6")
    assert codes == [-9] * 4, run.said
    return run


@pytest.fixture
def left(killed, shared_tiny, request):
    """The same as ``killed`` has left it, in its own place, which is put back before each test."""
    aside = shared_tiny.folder / "aside"
    places = (killed.path, killed.memory)
    if not aside.exists():
        for place in places:
            shutil.copytree(place, aside / place.parent.name, symlinks=True)
    for place in places:
        shutil.rmtree(place)
        shutil.copytree(aside / place.parent.name, place, symlinks=True)
    return killed


def values(lines):
    return [tuple(line[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")) for line in lines]


def assert_same(run, straight):
    assert values(run.lines()) == values(straight.lines())
    one, other = run.tensors(), straight.tensors()
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


RESUME = ("parallel.dp_shard=4", "checkpoint.interval=5", *MEMORY)


def test_a_killed_run_goes_on_from_memory_as_if_nothing_had_happened(left, straight):
    assert {file.name for file in left.kept(0).glob("*.distcp")} == {f"__{rank}_0.distcp" for rank in range(4)}

    assert left.start(*RESUME) == [0] * 4, left.said

    assert left.began() == [0, 6]
    assert "resumed from" in left.said
    assert str(left.memory) in left.said
    assert_same(left, straight)
    assert [*left.memory.glob("node*/forge-*")] == []  # a run that ends well lets go
    assert not (left.path / "memory.json").exists()


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_memory_of_a_lost_node_is_made_up_from_the_copy_on_the_next(left, straight, node):
    left.wipe(node)

    assert left.start(*RESUME) == [0] * 4, left.said

    assert left.began() == [0, 6]
    assert_same(left, straight)


def test_without_both_nodes_it_goes_on_from_the_disk(left, straight):
    left.wipe(0)
    left.wipe(1)

    assert left.start(*RESUME) == [0] * 4, left.said

    assert left.began() == [0, 5]
    assert_same(left, straight)


@pytest.mark.nightly
def test_with_parts_on_no_node_it_says_so_and_goes_on_from_the_disk(left, straight):
    for node in (0, 1):
        (left.kept(node) / "__2_0.distcp").unlink()

    assert left.start(*RESUME) == [0] * 4, left.said

    assert "the checkpoint of step 6 in memory cannot be used: 1 of its" in left.said
    assert left.began() == [0, 5]
    assert_same(left, straight)


@pytest.mark.nightly
def test_where_a_node_cannot_be_given_what_it_lacks_it_goes_on_from_the_disk(left, straight):
    (left.kept(1) / "job.toml").unlink()
    (left.kept(1) / "job.toml" / "in the way").mkdir(parents=True)

    assert left.start(*RESUME) == [0] * 4, left.said

    assert "the checkpoint of step 6 in memory cannot be used: cannot write to" in left.said
    assert left.began() == [0, 5]
    assert_same(left, straight)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_costs_nothing_while_the_copy_is_whole(left, straight):
    flip_a_bit(left.kept(0) / "__0_0.distcp")
    flip_a_bit(left.kept(1) / "state.json")

    assert left.start(*RESUME) == [0] * 4, left.said

    assert left.began() == [0, 6]
    assert_same(left, straight)


@pytest.mark.nightly
def test_a_bit_that_is_flipped_in_part_and_copy_is_told(left, straight):
    for node in (0, 1):
        flip_a_bit(left.kept(node) / "__3_0.distcp")

    assert left.start(*RESUME) == [0] * 4, left.said

    assert "(the content of __3_0.distcp is not what was written)" in left.said
    assert left.began() == [0, 5]
    assert_same(left, straight)


@pytest.mark.nightly
def test_a_link_is_not_followed(left, tmp_path):
    for node in (0, 1):
        part = left.kept(node) / "__3_0.distcp"
        part.rename(tmp_path / f"part{node}")
        part.symlink_to(tmp_path / f"part{node}")

    assert left.start(*RESUME) == [0] * 4, left.said

    assert "(__3_0.distcp is not a file of its own)" in left.said
    assert left.began() == [0, 5]


@pytest.mark.nightly  # by day, ranks find parts on another node when theirs was lost, or when they are fewer
def test_ranks_on_other_nodes_and_in_another_order_find_their_parts(left, straight):
    assert left.start(*RESUME, nodes=(1, 2, 2, 0)) == [0] * 4, left.said

    assert left.began() == [0, 6]
    assert_same(left, straight)


def test_fewer_ranks_on_one_node_go_on(left, straight):
    left.wipe(1)

    code = left.start("parallel.dp_shard=2", "checkpoint.interval=5", *MEMORY, nodes=(0, 0))

    assert code == [0, 0], left.said
    assert left.began() == [0, 6]
    assert "there is one node, so that they are lost with it" in left.said
    assert [line["step"] for line in left.lines()] == [*range(1, 11)]
    for one, other in zip(left.lines(), straight.lines(), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.parametrize("resume", ["5", pytest.param("never", marks=pytest.mark.nightly)])
def test_steps_that_were_given_up_are_not_taken(left, tmp_path, resume):
    """Not even where nodes that were away have kept them."""
    shutil.copytree(left.memory, tmp_path / "away")
    killed_at = "6:-1" if resume == "5" else "2:-1"
    assert left.start(*RESUME, "--resume", resume, killed_at=killed_at) == [-9] * 4, left.said
    without_links = shutil.ignore_patterns("latest")
    shutil.copytree(tmp_path / "away", left.memory, ignore=without_links, dirs_exist_ok=True)

    assert left.start(*RESUME, "--resume", resume) == [0] * 4, left.said

    assert left.began() == [0, *([5, 5] if resume == "5" else [0, 0])]
    assert [line["step"] for line in left.lines()] == [*range(1, 11)]


@pytest.mark.nightly
def test_after_a_start_without_memory_what_is_left_there_is_not_taken(left):
    """The steps may have been given up by then."""
    without = ("parallel.dp_shard=4", "checkpoint.interval=5")
    assert left.start(*without, killed_at="6:-1") == [-9] * 4, left.said

    assert left.start(*RESUME) == [0] * 4, left.said

    assert left.began() == [0, 5, 5]
    assert [*left.memory.glob("node*/forge-*")] == []


def test_what_another_run_has_left_in_the_same_place_is_not_taken(left):
    shutil.rmtree(left.path)

    assert left.start(*RESUME) == [0] * 4, left.said

    assert left.began() == [0]
    assert len([*left.memory.glob("node*/forge-*")]) == 2  # it is not this run's to remove


@pytest.mark.nightly
def test_a_copy_of_the_run_elsewhere_has_nothing_in_memory(left, shared_tiny):
    branch = TwoNodes(shared_tiny, "branch")
    shutil.rmtree(branch.path, ignore_errors=True)
    shutil.copytree(left.path, branch.path, symlinks=True)
    branch.memory = left.memory

    assert branch.start(*RESUME) == [0] * 4, branch.said

    assert branch.began() == [0, 5]


def test_a_folder_that_others_can_write_to_is_refused(left):
    left.kept(0).parent.parent.chmod(0o777)

    assert left.start(*RESUME) == [2] * 4

    assert "is not a folder that this user alone can write to" in left.said


def test_a_memory_that_is_too_small_is_refused_before_the_first_step(shared_tiny):
    run = TwoNodes(shared_tiny, "large")

    codes = run.start("model.dim=64", "parallel.dp_shard=4", *MEMORY, "run.name=large", killed_at="free:0")

    assert codes == [2] * 4, run.said

    assert "has 0 B, and two checkpoints of the 2 ranks there and of their copies of the node before" in run.said
    assert not (run.path / "metrics.jsonl").read_text()
    assert [*run.memory.glob("node*/forge-*")] == []


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["checkpoint.mirror.folder=$NOT_SET"], "the environment does not have what the name needs"),
        (["checkpoint.mirror.folder=memory"], "is no absolute path"),
        (["checkpoint.mirror.folder=/proc"], "cannot make /proc/"),
    ],
)
def test_a_folder_that_cannot_be_is_refused(shared_tiny, overrides, sentence):
    run = TwoNodes(shared_tiny, "nowhere")

    assert run.start(*MEMORY, *overrides, nodes=(0,)) == [2]

    assert sentence in run.said


@pytest.mark.nightly
def test_one_process_keeps_and_finds_its_checkpoints(shared_tiny):
    run = TwoNodes(shared_tiny, "alone")
    assert run.start("train.batch_size=4", *MEMORY, killed_at="8:6", nodes=(0,)) == [-9], run.said

    assert run.start("train.batch_size=4", *MEMORY, nodes=(0,)) == [0], run.said

    assert run.began() == [0, 6]
    assert [line["step"] for line in run.lines()] == [*range(1, 11)]


@pytest.mark.nightly
def test_replicas_of_shards_find_parts_that_others_have_written(shared_tiny):
    layout = ("parallel.dp_replicate=2", "parallel.dp_shard=2")
    straight, run = TwoNodes(shared_tiny, "hybrid-straight"), TwoNodes(shared_tiny, "hybrid")
    assert straight.start(*layout) == [0] * 4, straight.said
    assert run.start(*layout, *MEMORY, killed_at="8:6") == [-9] * 4, run.said
    parts = [*run.kept(0).glob("*.distcp")]
    assert sum(part.stat().st_size for part in parts) < 2 * 1_000_000  # once, though two replicas have them
    run.wipe(0)

    assert run.start(*layout, *MEMORY) == [0] * 4, run.said

    assert run.began() == [0, 6]
    assert_same(run, straight)


@pytest.fixture
def here(shared_tiny, tmp_path, monkeypatch):
    """Runs the tiny job in this process, under a name of its own, with a memory of its own."""
    wants = HostMemory.wants

    def waits(self, step):
        self._keeper.wait()
        return wants(self, step)

    monkeypatch.setattr(HostMemory, "wants", waits)
    monkeypatch.setenv("NODE_MEMORY", str(tmp_path))

    def start(*overrides):
        return main(["run", str(shared_tiny.config), f"run.name={tmp_path.name}", *MEMORY, *overrides])

    start.path = shared_tiny.path(tmp_path.name)
    start.kept = lambda: [folder.name for folder in tmp_path.glob("forge-*/*/step_*")]
    return start


def events(run, *names):
    lines = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    return [(line["event"], line["step"]) for line in lines if line["event"] in names]


@pytest.mark.parametrize("is_written", [True, False])
def test_a_run_that_goes_back_forgets_the_steps_that_it_gives_up(here, monkeypatch, is_written):
    write, goes_back = mirror._write, iter([False, True])

    def write_or_not(history, start):
        if next(goes_back) and not is_written:
            raise MirrorError("the shared disk is away")
        write(history, start)

    monkeypatch.setattr(mirror, "_write", write_or_not)
    train_step, once, seen = Trainer._train_step, iter([True]), []

    def step(self, microbatches):
        seen.append((self.step, here.kept()))
        counts = train_step(self, microbatches)
        if self.step == 8 and next(once, False):
            position = self.run.loader.position
            self.guard.to_leave_out = SampleRange(5, position - 16, position - 12, 1)
        return counts

    monkeypatch.setattr(Trainer, "_train_step", step)

    assert here("checkpoint.interval=4") == 0

    (again,) = [i for i, (number, _) in enumerate(seen) if number == 5][1:]
    assert seen[again] == (5, [])  # that of step 6 is gone
    assert [step for _, step in events(here, "kept_in_memory")] == [3, 6, 6, 9]
    assert len(events(here, "mirror_failed")) == (not is_written)


def test_what_is_in_memory_and_older_than_the_disk_is_not_described_to_the_end(here, monkeypatch):
    train_step, described = Trainer._train_step, []

    def step(self, microbatches):
        if self.step == 5:
            described.append(sum(isinstance(one, Metadata) for one in gc.get_objects()))
            raise RuntimeError("it ends here")
        return train_step(self, microbatches)

    monkeypatch.setattr(Trainer, "_train_step", step)
    assert here("checkpoint.interval=4") == here() == 1

    assert described[1:] == [0]
    assert events(here, "kept_in_memory", "resumed") == [("kept_in_memory", 3), ("resumed", 4)]


def test_a_checkpoint_is_left_out_while_the_one_before_is_written(here, monkeypatch, capsys):
    busy = iter([False, True, False])
    monkeypatch.setattr(Keeper, "is_busy", property(lambda self: next(busy, False)))

    assert here() == 0

    assert "checkpoint.mirror.every = 3 is little" in capsys.readouterr().out
    assert events(here, "kept_in_memory") == [("kept_in_memory", 3), ("kept_in_memory", 9)]


def test_what_the_run_may_not_save_ends_it_before_it_is_in_memory(here, monkeypatch, capsys):
    """It is no failure of the mirror, after which training could go on."""

    def check(self, run):
        raise PluginError("it keeps state that a resumed run could not be given")

    monkeypatch.setattr(OptimizerState, "save_start", check)

    assert here("checkpoint.on_failure=continue") != 0

    assert "it keeps state that a resumed run could not be given" in capsys.readouterr().err
    assert events(here, "failed", "mirror_failed", "kept_in_memory") == [("failed", 3)]


@pytest.mark.parametrize(("reaction", "code"), [("continue", 0), ("stop", 1)])
def test_one_that_cannot_be_written_is_told_and_the_one_before_stays(here, monkeypatch, capsys, reaction, code):
    complete, kept = keeper._complete, []

    def fail_once(folder, described):
        if described.manifest.step == 6:
            kept.extend(here.kept())
            raise OSError(28, "No space left on device", str(folder))
        complete(folder, described)

    monkeypatch.setattr(keeper, "_complete", fail_once)

    assert here(f"checkpoint.on_failure={reaction}") == code

    assert kept == ["step_00000003"]
    said = capsys.readouterr()
    assert "checkpoint of step 6 in memory: rank 0 cannot write to" in said.out + said.err
    assert ("mirror_failed", 6) in events(here, "mirror_failed")
    assert here.kept() == ([] if code == 0 else ["step_00000009"])
    assert ("the last checkpoint in memory stays in" in said.out) == (code != 0)


def test_a_file_that_cannot_be_written_keeps_no_other_rank_waiting(run_ranks, tmp_path):
    said = run_ranks(Path(__file__).with_name("exchange_rank.py"), 2, tmp_path)

    assert [text.split() for text in said] == [["sent"], ["IsADirectoryError", "True"]]
