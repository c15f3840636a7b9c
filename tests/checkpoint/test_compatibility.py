"""Which versions are other ones now."""

import torch

from forge_core import __version__
from forge_core.checkpoint.compatibility import versions_changed


def test_a_torch_whose_metadata_do_not_name_its_cuda_is_the_same(monkeypatch):
    """As the wheels of the public index: ``torch.__version__`` is 2.11.0+cu130, their metadata have 2.11.0."""
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")

    assert versions_changed({"forge-core": __version__, "torch": "2.11.0+cu130"}, {}) == []
    assert versions_changed({"torch": "2.11.0+cu126"}, {}) == ["torch 2.11.0+cu126 (now 2.11.0+cu130)"]
