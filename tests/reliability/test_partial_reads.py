"""However many ranks have written a checkpoint, and in whatever layout: each rank that reads it reads what it needs.

Bytes are those that the system counts for a process (``rchar``), whatever reads them.
"""

import json

import pytest

from faults.zygote import end

WRITTEN = [(1, "rows"), (2, "rows"), (2, "columns"), (8, "rows and columns")]
RECORD = 12_000
"""Bytes that are read of a record beside its values, at most."""
MORE = 64_000
"""Bytes that ranks may tell each other, and read of the description."""


@pytest.fixture(scope="module")
def stores(zygote, tmp_path_factory):
    found = []
    for ranks, layout in WRITTEN:
        scratch = tmp_path_factory.mktemp("write")
        store = str(scratch / "checkpoints")
        started = zygote.start(ranks, "faults.part_reading:write", scratch, store=store, layout=layout)
        assert end(started, 120) == []
        found.append(store)
    return found


@pytest.mark.parametrize("readers", [1, 3, 8, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_rank_reads_what_it_needs_and_opens_each_file_once(zygote, stores, tmp_path, readers):
    started = zygote.start(readers, "faults.part_reading:read", tmp_path, stores=stores)

    assert end(started, 240) == []
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(readers)]
    files = [tmp_path / f"read{rank}.json" for rank in range(readers)]
    assert all(file.exists() for file in files), logs
    reports = [report for file in files for report in json.loads(file.read_text())]
    assert len(reports) == readers * len(WRITTEN) * (2 if readers % 2 else 3)
    for report in reports:
        assert report["right"], report
        assert report["read"] <= 1.1 * report["needed"] + RECORD * report["records"] + MORE, report
        assert set(report["opened"].values()) == {1}, report
