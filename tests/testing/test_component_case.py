"""What all conformance classes share: how a component is named, and how it may be excused from a check."""

import re
import subprocess
import sys
from typing import ClassVar

import pytest

from forge_core.errors import ConfigError
from forge_testing.component_case import ComponentCase

SUITE = """
import pytest
from forge_testing.component_case import ComponentCase

class Kit(ComponentCase):
    kind = "router"

    def test_passes(self): pass
    def test_fails(self): assert False, "a sentence"
    @pytest.mark.parametrize("size", [1, 2])
    def test_sizes(self, size): assert size == 1, "a sentence about size"

class TestAll(Kit):
    pass

class TestExcused(Kit):
    expected_failures = {"test_fails": "by design", "test_sizes[2]": "by design"}

class TestExcusedInVain(Kit):
    expected_failures = {"test_passes": "by design", "test_sizes": "by design", "test_fails": "by design"}
"""


def test_expected_failures_are_strict_and_can_name_one_case(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )

    found = re.findall(r"^(PASSED|FAILED|XFAIL) test_suite\.py::(\S+)", run.stdout, re.MULTILINE)
    outcomes = {check: outcome for outcome, check in found}
    assert outcomes == {
        "TestAll::test_passes": "PASSED",
        "TestAll::test_fails": "FAILED",
        "TestAll::test_sizes[1]": "PASSED",
        "TestAll::test_sizes[2]": "FAILED",
        "TestExcused::test_passes": "PASSED",
        "TestExcused::test_fails": "XFAIL",
        "TestExcused::test_sizes[1]": "PASSED",
        "TestExcused::test_sizes[2]": "XFAIL",
        "TestExcusedInVain::test_passes": "FAILED",
        "TestExcusedInVain::test_fails": "XFAIL",
        "TestExcusedInVain::test_sizes[1]": "FAILED",
        "TestExcusedInVain::test_sizes[2]": "XFAIL",
    }
    assert "AssertionError: a sentence about size" in run.stdout


def test_an_excuse_for_an_unknown_check_is_refused():
    with pytest.raises(TypeError, match="names 'test_shpaes', which is not a check; did you mean 'test_shapes'"):

        class Case(ComponentCase):
            expected_failures: ClassVar = {"test_shpaes": "by design"}

            def test_shapes(self):
                pass


def test_a_component_is_resolved_with_its_configuration():
    class Case(ComponentCase):
        kind = "scheduler"
        component = "forge-plugins-optim:cosine"
        config: ClassVar = {"warmup_steps": 2}

    use = Case().use()

    assert (use.qualified_name, use.config.warmup_steps) == ("forge-plugins-optim:cosine", 2)
    assert Case().make(total_steps=4, tokens_per_step=8)(1) == 0.5


def test_a_wrong_configuration_is_told_as_in_a_job():
    class Case(ComponentCase):
        kind = "scheduler"
        component = "forge-plugins-optim:cosine"
        config: ClassVar = {"warmup": 2}

    with pytest.raises(ConfigError, match="warmup_steps"):
        Case().use()


def test_a_case_without_a_component_is_told():
    class Case(ComponentCase):
        kind = "scheduler"

    with pytest.raises(AssertionError, match=r"Case: set component = .* or override make"):
        Case().make()
