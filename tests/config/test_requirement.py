"""Requirements on installed distributions, compared with the reference implementation of PEP 440."""

from __future__ import annotations

import itertools

import pytest

from forge_core.config.requirement import Version, _parse, unmet
from forge_core.errors import ConfigError

specifiers = pytest.importorskip("packaging.specifiers")

VERSIONS = [
    "0.3",
    "0.3.0",
    "0.3.dev1",
    "0.3a1",
    "0.3a1.dev2",
    "0.3b2",
    "0.3rc1",
    "0.3.post1",
    "0.3.1",
    "0.4",
    "1",
    "1.0.1",
    "1.10",
    "2.13.0+cpu",
]


@pytest.mark.parametrize("clause", [f"{op}0.3" for op in ("==", "!=", ">=", "<=", "<", "~=")] + ["==0.3.*", "!=0.3.*"])
def test_clauses_admit_what_packaging_admits(clause):
    reference = specifiers.SpecifierSet(clause, prereleases=True)
    _, (ours,) = _parse(f"x{clause}")

    assert {v: ours.admits(Version.parse(v)) for v in VERSIONS} == {v: reference.contains(v) for v in VERSIONS}


@pytest.mark.parametrize("clause", [">0.3", ">0.2,<0.4", ">=0.3rc1", "~=1.0.0", "==2.13.0", "<0.4rc1", ">=1,!=1.10"])
def test_other_clauses_too(clause):
    reference = specifiers.SpecifierSet(clause, prereleases=True)
    _, clauses = _parse(f"x {clause}")
    versions = [version for version in VERSIONS if version != "0.3.post1"]  # `>` has a rule of its own for these

    found = {v: all(one.admits(Version.parse(v)) for one in clauses) for v in versions}

    assert found == {v: reference.contains(v) for v in versions}


def test_versions_sort_as_packaging_sorts_them():
    from packaging.version import Version as Reference

    for a, b in itertools.product(VERSIONS[:-1], repeat=2):
        assert (Version.parse(a).key < Version.parse(b).key) == (Reference(a) < Reference(b)), (a, b)


def test_what_is_installed_is_compared():
    assert unmet("attrs") is None
    assert unmet("Attrs >= 24, != 24.5") is None
    assert unmet("no_such.thing>=1") == "no_such.thing is not installed: pip install 'no_such.thing>=1'"
    assert "asks for attrs<1, and attrs " in str(unmet("attrs<1"))


@pytest.mark.parametrize("text", ["", "attrs ~ 1", "attrs>=x", "attrs>=1,,<2", "attrs[extra]", "attrs~=1", ">=1"])
def test_what_is_no_requirement_is_refused(text):
    with pytest.raises(ConfigError):
        unmet(text)
