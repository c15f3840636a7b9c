"""What differs between two jobs."""

from __future__ import annotations

import pytest

from forge_core.config.diff import Difference, differences


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, [Difference("a.b", 1, 2)]),
        ({"a": 1}, {"a": 1.0}, [Difference("a", 1, 1.0)]),
        ({"a": 1}, {"a": True}, [Difference("a", 1, True)]),
        ({"a": [1, 2]}, {"a": [1, 3]}, [Difference("a", [1, 2], [1, 3])]),
        ({"a": [1]}, {"a": [1.0]}, [Difference("a", [1], [1.0])]),
        ({"p": [{"k": 1}]}, {"p": [{"k": 2}]}, [Difference("p[0].k", 1, 2)]),
        ({"p": [{"k": 1}]}, {"p": []}, [Difference("p[0].k", 1, None), Difference("p", None, [])]),
        ({"x": 1, "z": 0}, {"y": 1, "z": 0}, [Difference("x", 1, None), Difference("y", None, 1)]),
        ({"t": {}}, {"t": {"k": 1}}, [Difference("t", {}, None), Difference("t.k", None, 1)]),
        ({}, {}, []),
    ],
)
def test_values_and_types_are_compared_key_by_key(a, b, expected):
    assert differences(a, b) == expected


def test_jobs_are_compared_after_resolution(load):
    from forge_core.job import job_table

    old, new = job_table(load()), job_table(load("optimizer.lr=1e-4", "parallel.passes.compile=true"))

    assert [change.key for change in differences(old, new)] == [
        "optimizer.lr",
        "parallel.passes",
        "parallel.passes.compile.name",
    ]
