"""What follows from the errors of a mirror that keeps checkpoints by itself."""

from pathlib import Path

import pytest
import torch

from forge_core.checkpoint.run_mirror import RunMirror
from forge_core.config.sections import CheckpointSection
from forge_core.contracts.checkpoint_mirror import CheckpointMirror, MirrorContext, MirrorStart
from forge_core.distributed.mesh import join_process_group
from forge_core.errors import LeaseLostError, MirrorError


@pytest.fixture(scope="module", autouse=True)
def group():
    join_process_group(torch.device("cpu"), 60.0)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def mirrored(tmp_path):
    """``mirrored(mirror, on_failure)``: as the run has it, and what it says."""

    def mirrored(mirror, on_failure="continue"):
        told = []
        context = MirrorContext(
            run_name="demo",
            folder=tmp_path,
            section=CheckpointSection(on_failure=on_failure),
            say=told.append,
            run_on_rank0=lambda work: work(),
        )
        return RunMirror(mirror, context, "checkpoint mirror 'full'", "acme-full"), told

    return mirrored


class Full(CheckpointMirror):
    def wants(self, step):
        if step == 3:
            raise OSError("it cannot be asked")
        return True

    def keep(self, snapshot):
        raise OSError("there is no more room")


@pytest.mark.parametrize(
    ("ask", "why"),
    [(lambda mirror: mirror.wants(3), "cannot be asked"), (lambda mirror: mirror.keep(None), "no more room")],
)
def test_training_goes_on_where_a_mirror_fails_to_keep_one(mirrored, ask, why):
    mirror, told = mirrored(Full())

    assert not ask(mirror)

    (line,) = told
    assert why in line
    assert "acme-full" in line
    assert "training goes on" in line


class Careless(CheckpointMirror):
    def may_remove(self, steps, sizes):
        if sizes:
            raise OSError("it does not answer")
        return [2, 4, 6]


def test_nothing_is_removed_that_a_mirror_was_not_asked_for_or_cannot_say(mirrored):
    mirror, _ = mirrored(Careless())

    assert mirror.may_remove([2, 6], {}) == [2, 6]
    assert mirror.may_remove([2, 6], {2: 10, 6: 10}) == []


class Gone(CheckpointMirror):
    closed = False

    def __init__(self, error=None):
        self._error = error or MirrorError("it is not there")

    def available(self):
        raise self._error

    last_job = available

    def begin(self, start):
        raise self._error

    def saved(self, path):
        raise self._error

    def close(self):
        self.closed = True


def test_a_run_starts_by_the_checkpoints_that_are_here_unless_it_is_to_stop_without_its_mirror(mirrored):
    mirror, told = mirrored(Gone())

    assert mirror.steps([4]) == []
    assert mirror.last_job() is None
    with pytest.raises(MirrorError, match="it is not there"):
        mirror.steps([])
    with pytest.raises(MirrorError, match="it is not there"):
        mirrored(Gone(), "stop")[0].steps([4])
    assert told == ["it is not there; going by the checkpoints that are here"]


def start_of(**keys):
    return MirrorStart(
        attempt="", job_toml="", step=4, refuse_if_lost=lambda: None, write_event=lambda name, **_: None, **keys
    )


def test_a_mirror_that_cannot_be_written_to_is_closed_if_the_run_does_not_start_without_it(mirrored):
    mirror, told = mirrored(one := Gone())

    mirror.take_over(start_of(may_start_without=True), lambda seconds: None)
    assert "training goes on" in told[0]
    assert not one.closed
    with pytest.raises(MirrorError, match="it is not there"):
        mirror.take_over(start_of(may_start_without=False), lambda seconds: None)
    assert one.closed


def test_an_attempt_that_another_has_followed_ends_though_it_is_to_go_on_without_its_mirror(mirrored):
    mirror, _ = mirrored(Gone(LeaseLostError("another one trains")))

    mirror.saved(Path("step_00000004"))

    with pytest.raises(LeaseLostError, match="another one trains"):
        mirror.refuse_if_failed()


class Trying(Gone):
    """It succeeds, or fails, when it tries again."""

    def __init__(self, tries, again=None):
        super().__init__()
        self._tries, self._again = tries, again

    def begin(self, start):
        self._start = start

    def try_again(self):
        if self._again:
            self._start.failed(4, self._again)
        return self._tries


@pytest.mark.parametrize(
    ("mirror", "said"),
    [
        (Trying(True), None),
        (Trying(False), "it is not there"),
        (Trying(True, MirrorError("nor now")), "nor now"),
        (Trying(False, MirrorError("nor now")), "nor now"),
    ],
)
def test_the_end_of_a_run_is_what_became_of_the_last_try(mirrored, mirror, said):
    of_run, _ = mirrored(mirror, "stop")
    of_run.take_over(start_of(may_start_without=False), lambda seconds: None)
    of_run.saved(Path("step_00000004"))

    if said is None:
        of_run.finish_run()
    else:
        with pytest.raises(MirrorError, match=said):
            of_run.finish_run()
