from types import SimpleNamespace

import pytest

from forge_core.config.sections import RunSection
from forge_core.distributed.timeouts import Timeouts


@pytest.mark.parametrize(("seconds", "is_said"), [(10.1, True), (9.9, False)])
def test_a_timeout_below_two_steps_is_told_once_when_the_first_step_is_out_of_the_measure(seconds, is_said):
    lines = []
    run, timeouts = SimpleNamespace(log=lines.append), Timeouts(RunSection(step_timeout=20.0))

    for step, measured in enumerate([15.0, seconds, seconds], start=1):
        timeouts.step_logged(run, step, {"step_seconds": measured})
        assert step > 1 or not lines

    assert len(lines) == is_said
    if is_said:
        assert lines[0].startswith("run.step_timeout = 20 is little: steps take 10.1 s, ")
        assert lines[0].endswith("; 21 would be twice that")
