"""Conformance of the kinds that this package adds: pytest classes to subclass, as those of ``forge_testing``."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.dispatcher")  # shows the values that were compared
