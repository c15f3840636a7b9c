"""Goal G3: whatever state a crash leaves the file system in, a whole checkpoint is found; and G4, that this would be
noticed if it were not so."""

import shutil

import pytest

from faults.crash_states import Recording, trace
from faults.saving import judge
from faults.zygote import end

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]


def states_of_four_saves(zygote, folder, *, background, saver="sound"):
    """Two ranks save four times; two old checkpoints are removed on the way."""
    folder.mkdir()
    ranks = zygote.start(
        2,
        "faults.saving:save_again_and_again",
        folder,
        store=str(folder / "checkpoints"),
        background=background,
        values=160,
        steps=4,
        saver=saver,
        gate=str(folder / "gate"),
    )
    try:
        tracer = trace(ranks, folder / "trace")
    except PermissionError as error:
        pytest.skip(f"strace may not look at other processes here: {error}")
    (folder / "gate").touch()
    assert end(ranks, 120) == []
    tracer.communicate(timeout=60)
    assert "saved 4" in (folder / "announced").read_text(), (folder / "rank0.log").read_text()
    return Recording(folder / "checkpoints").states(folder / "trace")


def problems_of(state, root):
    state.put(root)
    return judge(root, acknowledged=state.acknowledged, begun=state.begun).problems


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_every_state_a_crash_may_leave_has_what_was_acknowledged(zygote, tmp_path, background):
    states = list(states_of_four_saves(zygote, tmp_path / "saves", background=background))

    bad = [(state, problems) for state in states if (problems := problems_of(state, tmp_path / "root"))]

    print(f"{len(states)} states, {len(bad)} bad")
    assert len(states) > 300
    assert {state.acknowledged for state in states} == {0, 1, 2, 3, 4}
    assert not bad, (bad[0][1], [path for path, _, _ in bad[0][0].entries])


@pytest.mark.parametrize("saver", ["no file flush", "no folder flush", "overwrite in place", "manifest first"])
def test_crash_states_find_out_a_saver_that_has(zygote, tmp_path, saver):
    states = states_of_four_saves(zygote, tmp_path / "saves", background=False, saver=saver)

    assert any(problems_of(state, tmp_path / "root") for state in states)
