"""Requirements on installed distributions."""

from __future__ import annotations

import pytest

from forge_core.config.requirement import unmet


@pytest.mark.parametrize(
    ("installed", "met", "not_met"),
    [
        ("0.3", ["acme", "acme>=0.3,<0.4", "acme==0.3.*", "acme~=0.3", "Acme >= 0.2"], ["acme>0.3", "acme!=0.3.0"]),
        ("0.3.1", ["acme~=0.3.0", "acme>0.3"], ["acme~=0.4.0", "acme==0.3"]),
        ("0.4rc1", ["acme>=0.3", "acme>=0.4rc1"], ["acme<0.4", "acme>=0.4"]),
        ("0.3.dev1", ["acme>=0.3.dev0"], ["acme>=0.3"]),
        ("2.13.0+cpu", ["acme==2.13.0", "acme>=2.13"], ["acme>2.13.0"]),
        ("1.10", ["acme>=1.9", "acme>1.0.1"], ["acme<1.9"]),
    ],
)
def test_an_installed_version_is_compared(make_distribution, installed, met, not_met):
    make_distribution("acme", installed, {"acme/plugin.py": ""})

    assert [text for text in met if unmet(text) is not None] == []
    assert [text for text in not_met if unmet(text) is None] == []


def test_the_sentence_says_what_is_installed_and_what_to_do():
    assert unmet("attrs") is None
    assert unmet("Attrs >= 24, != 24.5") is None
    assert unmet("no_such.thing>=1") == "no_such.thing is not installed: pip install 'no_such.thing>=1'"
    assert "asks for attrs<1, and attrs " in str(unmet("attrs<1"))


@pytest.mark.parametrize(
    "text",
    ["", "attrs ~ 1", "attrs>=x", "attrs>=1,,<2", "attrs[extra]", "attrs~=1", ">=1", "attrs @ file:///x", "attrs; a"],
)
def test_what_is_no_requirement_is_refused(text):
    assert "is not a requirement such as" in str(unmet(text))
