"""Ends at which no Python runs any more leave stacks, and others nothing."""

import faulthandler
import json
import sys

import pytest

from forge_core.run.fatal import fatal_errors_kept, note_end


@pytest.mark.parametrize("was_enabled", [True, False])
def test_an_end_that_is_no_fatal_one_leaves_everything_as_it_was(tmp_path, was_enabled):
    faulthandler.enable(sys.__stderr__)
    if not was_enabled:
        faulthandler.disable()
    try:
        with fatal_errors_kept(tmp_path, 3):
            assert (tmp_path / "stacks" / "fatal_rank_3.txt").read_text() == ""
            assert faulthandler.is_enabled()
        assert faulthandler.is_enabled() == was_enabled
    finally:
        faulthandler.enable(sys.__stderr__)
    assert list(tmp_path.iterdir()) == []


def test_stacks_that_cannot_be_written_keep_no_run_from_training(tmp_path):
    (tmp_path / "stacks").write_text("a file of somebody else's")
    trained = []

    with fatal_errors_kept(tmp_path, 0):
        trained.append(1)

    assert trained == [1]
    assert (tmp_path / "stacks").read_text() == "a file of somebody else's"


@pytest.mark.parametrize("torn", ["", '{"event": "sav'])
def test_a_start_that_could_not_say_how_it_ended_has_its_end_noted_once(tmp_path, torn):
    path = tmp_path / "events.jsonl"
    note_end(tmp_path, "SIGBUS", 1)
    assert not path.exists()
    path.write_text('{"event": "started", "step": 0}\n{"event": "saved", "step": 7}\n' + torn)

    note_end(tmp_path, "SIGBUS", 1)
    note_end(tmp_path, "SIGSEGV", 1)

    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [("started", 0), ("saved", 7), ("failed", 7)]
    assert (events[-1]["error"], events[-1]["exit_code"]) == ("SIGBUS", 1)
