"""Time limits, and the seconds before them at which a run stops."""

import pytest

from forge_core.config.time_limit import lead_problem, seconds_of
from forge_core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("1:30", 90), ("12:00:00", 43_200), ("2-12", 216_000), ("1-00:30", 88_200), ("1-2:3:4", 93_784)],
)
def test_time_limits_are_read_as_slurm_reads_them(text, seconds):
    assert seconds_of(text) == seconds


def test_a_number_is_minutes():
    assert seconds_of(90) == seconds_of("90") == 5400


@pytest.mark.parametrize("text", ["", "0", "12h", "1:2:3:4", "-1", "1-", "UNLIMITED", 0, -1])
def test_what_is_no_time_limit_is_refused(text):
    with pytest.raises(ConfigError, match="is not a time limit"):
        seconds_of(text)


def test_a_lead_that_is_not_below_the_limit_is_refused_with_both_numbers():
    assert lead_problem(60, "2", "run.time_limit") is None
    assert lead_problem(120, "2", "run.time_limit").startswith("120 s is not below run.time_limit = '2' = 120 s")
    assert lead_problem(None, "1:30", "run.time_limit").startswith("120 s, the default, is not below run.time_limit")
