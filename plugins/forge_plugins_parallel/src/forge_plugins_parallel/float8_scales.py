"""The scales of weights that FSDP gathers in float8: of all of them at once."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from forge_core.contracts.model import canonical_name
from forge_core.errors import ConfigError
from forge_core.ops.local_tensor import local_tensor

_KEY = "parallel.passes.fp8.all_gather"


def scale_together(model: nn.Module, ranks: int, whole: Collection[nn.Parameter] = ()) -> None:
    """Have each forward of a model begin with one exchange of the largest values of all weights.

    Without it torchao exchanges that of each weight by itself, whenever it is gathered: in a Llama of 32 layers 224
    times per forward, and as often again in backward.

    An exchange per step would do, if it were known that weights have changed since: ``fused`` optimizers and
    ``parameter.data`` change them without a trace. Weights that are gathered already are left out.

    Args:
        ranks: how many share each weight.
        whole: weights that every rank has, which are not gathered.

    Raises:
        ConfigError: they cannot share one evenly.
    """
    left_out = {id(one) for one in whole}
    weights = {
        name: one
        for name, one in model.named_parameters()
        if hasattr(local_tensor(one), "_precomputed_scale") and id(one) not in left_out
    }
    for name, weight in weights.items():
        if weight.shape[0] % ranks:
            raise ConfigError(
                f"{_KEY}: {canonical_name(name)} has {weight.shape[0]} rows, which {ranks} ranks cannot share evenly, "
                "and torchao gathers nothing else in float8; set it to false, or change parallel.dp_shard"
            )
    if weights:
        model.register_forward_pre_hook(_scale, prepend=True)  # before FSDP's, which gathers


def _scale(model: nn.Module, _: Any) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp  # type: ignore[import-untyped]  # has no types

    precompute_float8_dynamic_scale_for_fsdp(model)
