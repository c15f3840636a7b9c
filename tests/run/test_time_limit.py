"""A run is asked to stop before the clock ends it."""

import time

import pytest

from forge_core.config.sections import RunSection
from forge_core.contracts.callback import TIME_LIMIT, Requests
from forge_core.distributed.cluster import note_job
from forge_core.errors import ConfigError
from forge_core.run import time_limit
from forge_plugins_slurm.cluster_environment import JOB_END as SLURM_END
from forge_plugins_slurm.cluster_environment import SlurmEnvironment
from forge_plugins_slurm.config import SlurmEnvironmentConfig


def TimeLimit(section, started, environment):  # as a run builds it
    note_job(SlurmEnvironment(SlurmEnvironmentConfig()), environment)
    return time_limit.TimeLimit(section, started, environment)


def wait_for_stop(deadline, seconds=30, told=None):
    """What was said, and whether the run was asked to stop within ``seconds``."""
    requests, said = Requests(), []
    with deadline.watched(requests, said.append, told.append if told is not None else str):
        end = time.monotonic() + seconds
        while not requests.stop and time.monotonic() < end:
            time.sleep(0.01)
    return requests.stop, said


def test_the_run_is_asked_to_stop_before_its_time_limit():
    section = RunSection(time_limit="1", stop_before_end=59.8)

    stop, said = wait_for_stop(TimeLimit(section, time.monotonic(), {}))

    assert stop == TIME_LIMIT
    assert said == ["run.time_limit = '1' comes in 59.8 s: will save and stop after this step"]


def test_the_end_of_the_slurm_job_counts_if_it_comes_first():
    section = RunSection(time_limit="12:00:00", stop_before_end=3000)
    ends_in_an_hour = {SLURM_END: str(int(time.time()) + 3002)}

    stop, said = wait_for_stop(TimeLimit(section, time.monotonic(), ends_in_an_hour))

    assert stop == TIME_LIMIT
    assert said == ["the end of the Slurm job comes in 3000 s: will save and stop after this step"]


def test_without_an_end_nothing_is_asked_and_no_thread_is_started():
    assert wait_for_stop(TimeLimit(RunSection(), time.monotonic(), {}), 0.05) == ("", [])


def test_the_end_of_a_slurm_job_that_is_over_means_nothing():
    over = {SLURM_END: str(int(time.time()) - 10)}

    assert wait_for_stop(TimeLimit(RunSection(), time.monotonic(), over), 0.05) == ("", [])


def test_what_was_asked_before_stays():
    requests = Requests(stop="SIGTERM")
    with TimeLimit(RunSection(time_limit="1", stop_before_end=59.99), time.monotonic(), {}).watched(requests, str, str):
        time.sleep(0.2)

    assert requests.stop == "SIGTERM"


def test_a_job_that_ends_too_soon_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"the Slurm job is 9[01] s away, .* run.stop_before_end = 120 s before it"):
        TimeLimit(RunSection(), time.monotonic(), {SLURM_END: str(int(time.time() + 90.9))})
    with pytest.raises(ConfigError, match=r"run.time_limit = '2' is 20 s away"):
        TimeLimit(RunSection(time_limit="2", stop_before_end=30), time.monotonic() - 100, {})


def test_a_save_that_takes_too_long_for_the_lead_moves_the_stop_forward():
    said = []
    deadline = TimeLimit(RunSection(time_limit="1:00:00"), time.monotonic(), {})

    deadline.must_hold(50, said.append)
    assert said == []
    deadline.must_hold(1799.9, said.append)

    assert len(said) == 1
    assert "saving took 1800 s, for which run.stop_before_end = 120 s leaves too little" in said[0]
    assert "will stop 3600 s before run.time_limit = '1:00:00'" in said[0]
    assert wait_for_stop(deadline)[0] == TIME_LIMIT


def test_a_save_and_a_step_of_its_length_must_fit_into_the_lead():
    said, deadline = [], TimeLimit(RunSection(time_limit="1:00:00", stop_before_end=100), time.monotonic(), {})

    deadline.must_hold(50, said.append)
    assert said == []
    deadline.must_hold(51, said.append)
    assert "will stop 102 s before" in said[0]


def saved(seconds):
    return {"event": "saved", "seconds": seconds}


def test_a_save_that_takes_too_long_moves_the_stop_forward_also_while_it_is_waited_for():
    deadline = TimeLimit(RunSection(time_limit="1", stop_before_end=20), time.monotonic(), {})
    requests = Requests()

    with deadline.watched(requests, str, str):
        time.sleep(0.1)
        deadline.must_hold(40.0, str)
        end = time.monotonic() + 10
        while not requests.stop and time.monotonic() < end:
            time.sleep(0.01)

    assert requests.stop == TIME_LIMIT


def test_what_is_to_be_told_of_a_stop_is_told_before_the_run_ends():
    deadline, told = TimeLimit(RunSection(time_limit="1", stop_before_end=59.9), time.monotonic(), {}), []

    def note(lead):
        time.sleep(0.2)
        told.append(lead)

    requests = Requests()
    with deadline.watched(requests, str, note):
        while not requests.stop:
            time.sleep(0.01)

    assert told == [59.9]


def test_slow_saves_of_before_do_not_shorten_the_time_that_is_asked_for():
    deadline = TimeLimit(RunSection(time_limit="1", stop_before_end=40), time.monotonic(), {})
    said = []

    deadline.learn([{"event": "saved", "seconds": 25.0}], said.append)

    assert said == ["saving has taken 25 s in an earlier start: this one will stop 40 s before run.time_limit = '1'"]


def test_a_start_begins_with_what_earlier_ones_have_needed():
    said = []
    deadline = TimeLimit(RunSection(time_limit="1:00:00"), time.monotonic(), {})

    deadline.learn([{"event": "started"}, saved(50), {"event": "skipped"}], said.append)
    assert said == []
    deadline.learn([saved(2000), *([saved(100)] * 9), {"event": "mirrored", "seconds": 300}], said.append)
    assert said == [
        "saving has taken 300 s in an earlier start: this one will stop 600 s before run.time_limit = '1:00:00'"
    ]


def test_half_of_the_time_is_trained_however_slow_a_save_was_once():
    said, told = [], []
    deadline = TimeLimit(RunSection(time_limit="1", stop_before_end=0.1), time.monotonic() - 54, {})

    deadline.learn([saved(2000)], said.append)

    assert said == ["saving has taken 2000 s in an earlier start: this one will stop 3 s before run.time_limit = '1'"]
    assert wait_for_stop(deadline, told=told)[0] == TIME_LIMIT
    assert told == [pytest.approx(3, abs=0.5)]


def test_a_start_that_was_killed_while_it_stopped_is_given_more_time_the_next_time():
    """With ``checkpoint.interval = 0`` there is only the save at the end, and no other to learn from."""
    section, killed = RunSection(time_limit="1:00:00"), [{"event": "started"}, {"event": "stopping", "lead": 120.0}]
    for events, lead in (
        (killed, "240"),
        ([*killed, {"event": "resumed"}, {"event": "stopping", "lead": 240.0}, {"event": "skipped"}], "480"),
        ([*killed, {"event": "preempted"}], None),
        ([*killed, {"event": "resumed"}], None),
    ):
        said = []

        TimeLimit(section, time.monotonic(), {}).learn(events, said.append)

        assert [line.rpartition("will stop ")[2].partition(" s ")[0] for line in said] == ([lead] if lead else [])
