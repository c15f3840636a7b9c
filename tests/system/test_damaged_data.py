"""Token files that change while a run reads them."""

import json
import time

import numpy as np
import pytest

from forge_core.cli import main
from forge_core.data.loader import BatchLoader
from forge_plugins_data.shard_writer import ShardWriter
from forge_plugins_data.token_format import INDEX, TokenHeader, write_header
from forge_plugins_monitor.run_states.progress import killed_by


@pytest.fixture
def train(tiny, capfd):
    """A function that trains on prepared tokens, of which ``tokens_file`` has the ids; returns exit code, output."""
    with ShardWriter(tiny.folder / "0.bin", dtype="uint16", end_of_document=256) as writer:
        writer.add(np.arange(20_000) % 256)
        shard = writer.finish()
    header = TokenHeader(dtype="uint16", vocab_size=257, end_of_document=256, shards=(shard,))
    write_header(tiny.folder / INDEX, header)
    data = f'data={{name = "token_files", path = "{tiny.folder}", validation = 0.1}}'

    def train(*settings):
        try:
            code = main(["run", str(tiny.config), data, *settings])
        except SystemExit as ended:  # of a launcher
            code = ended.code
        return code, "".join(capfd.readouterr())

    train.file, train.run = tiny.folder / "0.bin", tiny.path()
    return train


def overwrite(file, position, token):
    np.memmap(file, dtype="uint16", mode="r+")[position] = token


EVALUATED = 'evaluations=[{name="perplexity", samples=4, interval=1, data={name="token_files", path="$FOLDER"}}]'


@pytest.mark.parametrize("evaluates", [False, True], ids=["trained on", "evaluated"])
def test_a_flipped_bit_is_told_with_a_line_and_an_event_and_the_run_goes_on(train, tiny, monkeypatch, evaluates):
    overwrite(train.file, 7000, 3)
    text = f'data={{name="text_files", path="{tiny.folder}/text", pattern="**/*.txt"}}'
    settings = [text, EVALUATED.replace("$FOLDER", str(tiny.folder))] if evaluates else []
    read = BatchLoader.__next__

    n_read = 0

    def waiting(loader):
        nonlocal n_read
        found = train.run / "events.jsonl"
        deadline = time.monotonic() + 60
        n_read += 1
        is_read = n_read > (
            2 if evaluates else 1
        )  # the second batch is read before the evaluation after the first step
        while is_read and "data_damaged" not in found.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        return read(loader)

    monkeypatch.setattr(BatchLoader, "__next__", waiting)

    code, printed = train("train.steps=4", *settings)

    assert code == 0, printed
    assert f"data: {train.file} is damaged: its checksum is not the one of its JSON" in printed
    events = [json.loads(line) for line in (train.run / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "data_damaged"]
    assert event["error"].startswith(f"{train.file} is damaged")


def test_with_verify_before_a_flipped_bit_is_refused_and_nothing_is_written(train):
    overwrite(train.file, 7000, 3)

    code, printed = train("data.verify=before")

    assert code == 2
    assert f"{train.file} is damaged: its checksum is not" in printed
    assert not train.run.exists()


def test_ids_beyond_the_vocabulary_that_come_while_a_run_reads_end_it_with_file_position_and_id(train, monkeypatch):
    read = BatchLoader.__next__

    def harmed(loader):
        np.memmap(train.file, dtype="uint16", mode="r+")[:] = 999
        return read(loader)

    monkeypatch.setattr(BatchLoader, "__next__", harmed)

    code, printed = train("data.workers=0", "data.verify=never")

    assert code == 2
    assert f"{train.file}: token " in printed
    assert "has the id 999, but the vocabulary has 257 (ids 0 to 256)" in printed
    assert "bug in Forge" not in printed


SHRINKS = """
import os, sys
import torch
from forge_core.cli import main
from forge_core.data.loader import BatchLoader

read = BatchLoader.__next__

def harmed(loader):
    if loader.position >= 8:
        if os.environ["RANK"] == "1":
            torch.distributed.barrier()  # rank 0 is the one that finds out
        os.truncate({file!r}, 0)
    return read(loader)

BatchLoader.__next__ = harmed
sys.exit(main())
"""


def test_a_file_that_shrinks_while_it_is_read_is_told_by_launcher_status_and_event(train, tiny, monkeypatch):
    """A process that reads what is not there any more gets SIGBUS."""
    script = tiny.folder / "forge_that_shrinks.py"
    script.write_text(SHRINKS.format(file=str(train.file)))
    monkeypatch.setattr("forge_core.launch.RANK_PROGRAM", (str(script),))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    code, printed = train("--nproc", "2", "train.batch_size=2", "data.verify=never", "data.workers=0")

    assert code == 5
    assert "rank 0 has ended by SIGBUS: a file that was being read has become shorter, or a disk has failed" in printed
    events = [json.loads(line) for line in (train.run / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "failed"
    assert events[-1]["error"].startswith("a rank was killed by SIGBUS: a file that was being read has become shorter")
    assert killed_by(train.run).startswith("SIGBUS: a file that was being read has become shorter")
