"""A resolved choice of component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class ComponentRef:
    """A resolved choice of component: which one, from which distribution, with which configuration.

    Build it with the ``Builder`` that the factory of the surrounding component is given.
    """

    kind: str
    name: str
    provider: str
    """The distribution that registered the component."""
    factory: str
    config: Any
    """An instance of the component's config class, or of one whose fields are parameters of its factory."""
    takes: frozenset[str] | None = attrs.field(default=None, eq=False, repr=False)
    """Keywords of the factory, if its keys are parameters: it is called with them, and not with ``config``. With
    ``**``, it takes any."""
    written: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False)
    """Keys of the config that were written otherwise, with what was written: ``{"feed_forward.n_experts":
    "num_experts"}``. From the config class's ``expand``; messages are about what was written. ``{"url": ""}``: a string
    stands for the whole table, as ``Slot.text_key`` has it."""

    @property
    def qualified_name(self) -> str:
        """``"distribution:name"``, unambiguous with any set of installed plugins."""
        return f"{self.provider}:{self.name}"
