"""What passes did is told in few words: names that differ in a number only are one."""

import pytest

from forge_core.contracts.observer import PassTrace
from forge_plugins_plan.pass_table import WIDTH, folded, pass_table


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ""),
        ([""], "the model"),
        (["embed", "norm"], "embed, norm"),
        ([f"blocks.{i}" for i in range(12)], "blocks.0–11"),
        (["blocks.3"], "blocks.3"),
        (["embed", "blocks.0", "blocks.3", "blocks.4", "head"], "embed, blocks.0,3–4, head"),
        (["blocks.10", "blocks.9"], "blocks.9–10"),
        (["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"], "blocks.0–1.up, blocks.0–1.down"),
        (["blocks.0.up", "blocks.1.down"], "blocks.0.up, blocks.1.down"),
        ([f"blocks.{i}.experts.{j}" for i in range(2) for j in range(8)], "blocks.0–1.experts.0–7"),
        (["", "blocks.0.core", "blocks.1.core"], "the model, blocks.0–1.core"),
    ],
)
def test_names_that_differ_in_numbers_are_folded(names, expected):
    assert folded(names) == expected


def test_each_pass_has_its_line_in_the_order_given():
    lines = pass_table(
        [PassTrace("acme:zoom", "shard", [["blocks.0", "blocks.1"]]), PassTrace("a:fsdp", "fsdp", [[""]])]
    )

    assert [line.split() for line in lines] == [
        ["pass", "phase", "modules", "touched"],
        ["acme:zoom", "shard", "2", "blocks.0–1"],
        ["a:fsdp", "fsdp", "1", "the", "model"],
    ]


def test_ranks_of_a_pipeline_have_a_line_each():
    lines = pass_table(
        [PassTrace("a:pipeline", "split", [["embed", "blocks.0"], []]), PassTrace("a:x", "fsdp", [[""], [""]])]
    )

    assert lines[0].split() == ["pass", "phase", "rank", "of", "pp", "modules", "touched"]
    assert [line.split() for line in lines[1:]] == [
        ["a:pipeline", "split", "0", "2", "embed,", "blocks.0"],
        ["1", "0", "nothing"],
        ["a:x", "fsdp", "0", "1", "the", "model"],
        ["1", "1", "the", "model"],
    ]


def test_long_lists_go_on_below_and_lose_nothing():
    names = [f"blocks.0.layer_with_a_long_name_{letter}" for letter in "abcdefghijklmnop"]

    lines = pass_table([PassTrace("acme:zoom", "shard", [names])])

    assert max(map(len, lines)) <= WIDTH
    assert len(lines) > 3
    assert all(any(name in line for line in lines) for name in names)
