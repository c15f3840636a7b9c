"""The conformance kit: what the contracts promise, as pytest classes to subclass, one module a kind.

``from forge_testing.router import RouterConformance``, and in a test module::

    class TestMyRouter(RouterConformance):
        component = "my-dist:my_router"
        config = {"top_k": 2}

Every check has a sentence that says what is wrong. Needs pytest, and torch for the kinds that do.
"""

import sys

if "pytest" in sys.modules:  # every forge command imports this package for `forge new`, and pytest takes 0.1 s
    from pathlib import Path

    import pytest

    # Without this a failed check would show its sentence, but not the values that were compared.
    pytest.register_assert_rewrite(*(f"{__name__}.{path.stem}" for path in Path(__file__).parent.glob("[a-z]*.py")))
