"""A run is asked to stop before the clock ends it."""

import time

import pytest

from forge_core.config.sections import RunSection
from forge_core.contracts.callback import TIME_LIMIT, Requests
from forge_core.engine.deadline import SLURM_END, Deadline
from forge_core.errors import ConfigError


def wait_for_stop(deadline, seconds=30):
    """What was said, and whether the run was asked to stop within ``seconds``."""
    requests, said = Requests(), []
    with deadline.watched(requests, said.append):
        end = time.monotonic() + seconds
        while not requests.stop and time.monotonic() < end:
            time.sleep(0.01)
    return requests.stop, said


def test_the_run_is_asked_to_stop_before_its_time_limit():
    section = RunSection(time_limit="1", stop_before_end=59.8)

    stop, said = wait_for_stop(Deadline(section, time.monotonic(), {}))

    assert stop == TIME_LIMIT
    assert said == ["run.time_limit = '1' comes in 59.8 s: will save and stop after this step"]


def test_the_end_of_the_slurm_job_counts_if_it_comes_first():
    section = RunSection(time_limit="12:00:00", stop_before_end=3000)
    ends_in_an_hour = {SLURM_END: str(int(time.time()) + 3002)}

    stop, said = wait_for_stop(Deadline(section, time.monotonic(), ends_in_an_hour))

    assert stop == TIME_LIMIT
    assert said == ["the end of the Slurm job comes in 3000 s: will save and stop after this step"]


def test_without_an_end_nothing_is_asked_and_no_thread_is_started():
    assert wait_for_stop(Deadline(RunSection(), time.monotonic(), {}), 0.05) == ("", [])


def test_the_end_of_a_slurm_job_that_is_over_means_nothing():
    over = {SLURM_END: str(int(time.time()) - 10)}

    assert wait_for_stop(Deadline(RunSection(), time.monotonic(), over), 0.05) == ("", [])


def test_what_was_asked_before_stays():
    requests = Requests(stop="SIGTERM")
    with Deadline(RunSection(time_limit="1", stop_before_end=59.99), time.monotonic(), {}).watched(requests, str):
        time.sleep(0.2)

    assert requests.stop == "SIGTERM"


def test_a_job_that_ends_too_soon_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"the Slurm job is 9[01] s away, .* run.stop_before_end = 120 s before it"):
        Deadline(RunSection(), time.monotonic(), {SLURM_END: str(int(time.time() + 90.9))})
    with pytest.raises(ConfigError, match=r"run.time_limit = '2' is 20 s away"):
        Deadline(RunSection(time_limit="2", stop_before_end=30), time.monotonic() - 100, {})


def test_a_save_that_takes_too_long_for_the_lead_moves_the_stop_forward():
    said = []
    deadline = Deadline(RunSection(time_limit="1:00:00"), time.monotonic(), {})

    deadline.must_hold(50, said.append)
    assert said == []
    deadline.must_hold(1799.9, said.append)

    assert len(said) == 1
    assert "saving took 1800 s, for which run.stop_before_end = 120 s leaves too little" in said[0]
    assert "will stop 3600 s before run.time_limit = '1:00:00'" in said[0]
    assert wait_for_stop(deadline)[0] == TIME_LIMIT
