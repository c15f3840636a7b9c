"""``kill -9`` while checkpoints are copied: whatever a mirror then says it has, it has whole."""

import random
import signal
import time

import pytest

from faults.copying import COPYING, problems_at
from faults.zygote import end
from forge_plugins_mirror.mirror import open_mirror

NORMAL, NIGHTLY, TORTURE = 25, 200, 1000


@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("scheme", ["", "objects://"])
@pytest.mark.parametrize(
    "trials",
    [
        NORMAL,
        pytest.param(NIGHTLY, marks=pytest.mark.nightly),
        pytest.param(TORTURE, marks=pytest.mark.torture),
    ],
)
def test_a_kill_at_any_moment_of_a_copy_leaves_whole_ones_and_the_next_attempt_goes_on(
    zygote, tmp_path, scheme, trials
):
    """On a path, and where nothing can be renamed."""
    url, chosen = f"{scheme}{tmp_path}/far/run", random.Random(trials)
    newest = []
    for trial in range(trials):
        _kill_while_copying(zygote, tmp_path / f"{trial:x}", url, chosen)
        assert problems_at(url) == [], f"trial {trial}"
        newest.append(max(open_mirror(url).checkpoints(), default=0))
    assert newest == sorted(newest), "what was there is lost"


def test_kills_find_out_a_mirror_that_writes_the_manifest_first(zygote, tmp_path):
    url, chosen = f"objects://{tmp_path}/far/run", random.Random(4)
    for trial in range(40):
        _kill_while_copying(zygote, tmp_path / f"{trial:x}", url, chosen, mutant=True)
        if problems_at(url):
            return
    pytest.fail("40 kills have not found it out")


def _kill_while_copying(zygote, scratch, url, chosen, **arguments):
    scratch.mkdir()
    ranks = zygote.start(1, "faults.copying:copy_again_and_again", scratch, url=url, **arguments)
    deadline = time.monotonic() + 60
    while not (scratch / COPYING).exists():
        assert ranks[0].is_running, (scratch / "rank0.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(chosen.random() * 1.2 * float((scratch / COPYING).read_text()))
    assert ranks[0].is_running, (scratch / "rank0.log").read_text()
    ranks[0].send(signal.SIGKILL)
    assert end(ranks) == []
