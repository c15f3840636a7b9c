"""The families of published models, from the layouts that are installed, the shapes in ``configs/model`` and the tests
that compare a family with ``transformers``."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs

from forge_core.config.builder import ComponentBuilder
from forge_core.registry.catalog import Catalog

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "plugins" / "forge_plugins_hf" / "tests" / "published_models.json"
"""Shapes, each with its published ``config.json`` and number of parameters, which a test compares."""
_OF_ALL = (
    *("name", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "max_seq_len"),
    *("init_std", "norm_eps", "rope_theta", "feed_forward"),
)
"""Keys of every family: sizes, and what differs from size to size."""


@attrs.frozen
class Family:
    """An architecture of ``config.json``."""

    architecture: str
    layout: str
    """The qualified name of its component."""
    shapes: tuple[str, ...]
    """Of ``configs/model``."""
    keys: tuple[str, ...]
    """Keys of ``[model]`` that these shapes set beside those of every family."""
    tests: tuple[str, ...]
    """Files of its package that compare it with ``transformers``, by their paths in the repository."""


def families(catalog: Catalog) -> Iterator[Family]:
    """Those of all installed layouts."""
    build, published = ComponentBuilder(catalog), json.loads(PUBLISHED.read_text(encoding="utf-8"))
    files = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for pattern in ("plugins/*/tests/test_*.py", "forge_plugins_*/tests/test_*.py")
        for path in sorted(ROOT.glob(pattern))
    }
    for entry in catalog.components("weight_layout"):
        layout = build(build.resolve("weight_layout", entry.qualified_name))
        for architecture in layout.architectures:
            shapes = [name for name, one in published.items() if one["config"]["architectures"] == [architecture]]
            keys = {key for shape in shapes for key in _keys(shape)}
            mentions = _configured(architecture)
            own = f"{entry.qualified_name.split(':')[0].replace('-', '_')}/tests/"
            tests = [name for name, text in files.items() if own in name and mentions.search(text)]
            yield Family(architecture, entry.qualified_name, tuple(shapes), tuple(sorted(keys)), tuple(tests))


def _keys(shape: str) -> Iterator[str]:
    text = (ROOT / "configs" / "model" / f"{shape}.toml").read_text(encoding="utf-8")
    yield from (key for key in tomllib.loads(text)["model"] if key not in _OF_ALL)


def _configured(architecture: str) -> re.Pattern[str]:
    """Where a test makes the configuration of ``transformers`` for an architecture."""
    name = re.sub(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$", "", architecture)
    return re.compile(rf"\b{name}(Text)?Config\b")
