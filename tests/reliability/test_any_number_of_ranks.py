"""Goal G18: what so many ranks have written, any other number reads: to the bit, in shards of unequal sizes, or none.

Whole models and optimizers go from one layout to another in the matrix of ``tests/parity``.
"""

import json

import pytest

from faults.zygote import end

QUICK = [(1, 3), (4, 3), (2, 4)]
REST = [(n, m) for n in (1, 2, 4) for m in (1, 2, 3, 4) if (n, m) not in QUICK]


@pytest.mark.parametrize(
    ("writers", "readers"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in REST)]
)
def test_other_ranks_read_what_was_written_to_the_bit(zygote, tmp_path, writers, readers):
    held = {}
    for name, ranks in (("write", writers), ("read", readers)):
        scratch = tmp_path / name
        scratch.mkdir()
        started = zygote.start(ranks, f"faults.resharding:{name}", scratch, store=str(tmp_path / "checkpoints"))
        assert end(started, 120) == []
        logs = [(scratch / f"rank{rank}.log").read_text() for rank in range(ranks)]
        reports = [scratch / f"held{rank}.json" for rank in range(ranks)]
        assert all(report.exists() for report in reports), logs
        held[name] = {report.read_text() for report in reports}

    assert len(held["write"]) == 1
    assert held["read"] == held["write"]
    assert json.loads(held["read"].pop())["position"] == 12345
