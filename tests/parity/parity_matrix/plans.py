"""Plans that ours do not have."""

from __future__ import annotations

from forge_core.contracts.model import ShardRole
from forge_plugins_dense.feed_forward import MLP
from forge_plugins_dense.transformer import Transformer


class WholeMLP(MLP):
    """Not cut: under tensor parallelism each rank does all of its work."""

    def parallel_plan(self) -> dict[str, ShardRole]:
        return {"": "whole"}


class WithoutPositionsApart(Transformer):
    """Names no module that works on some of the positions, so that each rank has all of them everywhere."""

    def parallel_plan(self) -> dict[str, ShardRole]:
        return {name: role for name, role in super().parallel_plan().items() if role != "sequence"}
