import pytest

from forge_core.contracts.model import fits, is_within


@pytest.mark.parametrize(
    ("name", "pattern", "fitting", "within"),
    [
        ("blocks.3.head", "blocks.*.head", True, True),
        ("blocks.3.head", "blocks.3.head", True, True),
        ("blocks.3.head.norm", "blocks.*.head", False, True),
        ("blocks.3.headers", "blocks.*.head", False, False),
        ("blocks.3", "blocks.*.head", False, False),
        ("head", "*", True, True),
    ],
)
def test_a_star_stands_for_one_part_of_a_name(name, pattern, fitting, within):
    assert fits(name, pattern) is fitting
    assert is_within(name, pattern) is within
