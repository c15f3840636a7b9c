"""A warm start beside passes that add parameters."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from forge_core.contracts.parallel_pass import Folded
from forge_core.errors import ConfigError
from forge_plugins_weights.warm_start import _added, _Chosen


class Adapters:
    """A pass that folds the layers that it is given alone."""

    def __init__(self, layers, scale):
        self._layers, self._scale = layers, scale

    def folded(self, names):
        reads = {one: (f"{one}.weight", f"{one}.up") for one in self._layers if f"{one}.up" in names}
        return {weight: Folded((weight, up), lambda weight, _: weight, self._scale) for weight, up in reads.values()}


START = _Chosen(
    "checkpoint.load",
    SimpleNamespace(path=Path("dense")),
    {key: key for key in ("model.a.weight", "model.a.up", "model.b.weight", "model.b.up")},
    frozenset(),
)


def test_a_pass_may_be_about_fewer_layers_than_in_the_checkpoint():
    added = _added(START, "adapters", Adapters("ab", 2.0), Adapters("a", 2.0))

    assert (added["model.a.weight"], added["model.b.weight"]) == (["model.a.up"], ["model.b.up"])
    with pytest.raises(ConfigError, match=r"the scale 2\.0, and this job with 4\.0"):
        _added(START, "adapters", Adapters("ab", 2.0), Adapters("b", 4.0))
