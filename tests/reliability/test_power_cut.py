"""Goal G2: a power cut at any moment loses nothing that was acknowledged."""

import random
import time

import pytest

from faults.power import NotPermittedError, power_disk
from faults.saving import announced, judge
from faults.zygote import end

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
CUTS = 200


@pytest.fixture
def disk(tmp_path):
    try:
        with power_disk(tmp_path) as made:
            yield made
    except NotPermittedError as error:
        pytest.skip(str(error))


def cuts(zygote, disk, scratch, number, *, background, saver="sound"):
    """What is wrong after each power cut, while two ranks save without a pause."""
    store = disk.path / "checkpoints"
    ranks = zygote.start(
        2,
        "faults.saving:save_again_and_again",
        scratch,
        store=str(store),
        background=background,
        values=250_000,
        steps=1_000_000,
        saver=saver,
    )
    chosen = random.Random(number)
    try:
        for _ in range(number):
            time.sleep(chosen.random() * max(0.1, announced(scratch).seconds))
            acknowledged = announced(scratch).saved
            disk.cut()
            begun = announced(scratch).begun
            with disk.after_the_cut() as after:
                yield acknowledged, judge(after / "checkpoints", acknowledged=acknowledged, begun=begun).problems
            assert all(rank.is_running for rank in ranks), (scratch / "rank0.log").read_text()
    finally:
        for rank in ranks:
            rank.send(9)
        end(ranks)


@pytest.mark.parametrize("background", [False, True])
def test_a_power_cut_leaves_what_was_acknowledged(zygote, disk, tmp_path, background):
    outcomes = list(cuts(zygote, disk, tmp_path, CUTS // 2, background=background))

    bad = [problems for _, problems in outcomes if problems]
    print(f"{len(outcomes)} cuts, {len(bad)} bad, {len({step for step, _ in outcomes})} steps")
    assert bad == []
    assert len(outcomes) == CUTS // 2
    assert len({step for step, _ in outcomes}) > CUTS // 8, "hardly anything was saved between cuts"


@pytest.mark.parametrize("saver", ["no file flush", "no folder flush"])
def test_power_cuts_find_out_a_saver_with(zygote, disk, tmp_path, saver):
    outcomes = cuts(zygote, disk, tmp_path, CUTS, background=False, saver=saver)

    assert any(problems for _, problems in outcomes)
    outcomes.close()
