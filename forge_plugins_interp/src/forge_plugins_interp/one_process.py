"""The mesh of a model that this process has whole, apart from other ranks."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen
class OneProcess:
    """As much of a ``Mesh`` as placing sites takes."""

    degrees = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp"), 1)

    def gather_over(self, axis: str, value: Any) -> list[Any]:
        """The values of the ranks along an axis: this one's."""
        return [value]
