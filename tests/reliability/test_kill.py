"""Goal G1: ``kill -9`` at any moment of a save loses nothing that was acknowledged, and leaves nothing half."""

import random
import shutil
import signal
import time
from collections import Counter

import pytest

from faults.saving import announced, judge
from faults.zygote import end

NORMAL, NIGHTLY, TORTURE = 20, 300, 1000

trials = pytest.mark.parametrize(
    "trials",
    [
        pytest.param(NORMAL, marks=pytest.mark.slow),
        pytest.param(NIGHTLY, marks=pytest.mark.nightly),
        pytest.param(TORTURE, marks=pytest.mark.torture),
    ],
)


@trials
@pytest.mark.timeout(6 * 3600)
def test_a_kill_at_any_moment_leaves_the_last_or_the_last_but_one_exactly(zygote, tmp_path, trials):
    chosen, seen = random.Random(trials), Counter()
    for trial in range(trials):
        outcome, problems = kill_while_saving(
            zygote, tmp_path / str(trial), chosen, background=trial % 2 == 1, both=trial % 4 < 2
        )
        assert problems == [], f"trial {trial}"
        seen[outcome] += 1
    print(f"{trials} kills: {dict(seen)}")
    assert seen["in a save"] >= trials // 4, f"hardly any kill hit a save: {dict(seen)}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("saver", ["overwrite in place", "manifest first"])
def test_kills_find_out_a_saver_that_is(zygote, tmp_path, saver):
    """G4: the test above has teeth."""
    chosen = random.Random(4)
    for trial in range(40):
        _, problems = kill_while_saving(zygote, tmp_path / str(trial), chosen, background=False, both=True, saver=saver)
        if problems:
            return
    pytest.fail(f"40 kills have not found out a saver with {saver}")


def kill_while_saving(zygote, folder, chosen, *, background, both, saver="sound"):
    """What was going on when the kill came, and what is wrong now."""
    folder.mkdir()
    store = folder / "checkpoints"
    ranks = zygote.start(
        2,
        "faults.saving:save_again_and_again",
        folder,
        store=str(store),
        background=background,
        values=500_000,
        steps=1000,
        saver=saver,
    )
    step, share = chosen.randint(2, 4), chosen.random() * 1.1
    deadline = time.monotonic() + 120
    while announced(folder).begun < step:
        assert time.monotonic() < deadline, (folder / "rank0.log").read_text()
        assert all(rank.is_running for rank in ranks), (folder / "rank0.log").read_text()
        time.sleep(0.001)
    time.sleep(share * announced(folder).seconds)

    before = announced(folder)
    for rank in ranks if both else chosen.sample(ranks, 1):
        rank.send(signal.SIGKILL)
    stuck = end(ranks)
    after = announced(folder)  # a survivor may still have finished, and said so

    verdict = judge(store, acknowledged=after.saved, begun=after.begun)
    problems = [*verdict.problems, *(f"process {process} did not notice" for process in stuck)]
    if not problems:
        shutil.rmtree(folder)
    return ("in a save" if before.begun > before.saved else "between saves"), problems
