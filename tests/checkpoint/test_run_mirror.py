"""What follows from the errors of a mirror that keeps checkpoints by itself."""

import pytest

from forge_core.checkpoint.run_mirror import RunMirror
from forge_core.config.sections import CheckpointSection
from forge_core.contracts.checkpoint_mirror import CheckpointMirror, MirrorContext


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
def test_training_goes_on_where_a_mirror_fails_to_keep_one(tmp_path, ask, why):
    told = []
    context = MirrorContext(
        run_name="demo",
        folder=tmp_path,
        section=CheckpointSection(on_failure="continue"),
        say=told.append,
        run_on_rank0=lambda work: work(),
    )

    assert not ask(RunMirror(Full(), context, "checkpoint mirror 'full'", "acme-full"))

    (line,) = told
    assert why in line
    assert "acme-full" in line
    assert "training goes on" in line
