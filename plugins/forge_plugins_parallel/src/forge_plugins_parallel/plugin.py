"""What this package registers. Every forge command imports this file: keep it free of torch."""

from collections.abc import Iterable

from forge_core.api import PassComponent, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_parallel_passes() -> Iterable[PassComponent]:
    yield PassComponent(
        name="compile",
        summary="torch.compile for each block, so that compile time does not grow with depth",
        factory="forge_plugins_parallel.compile:Compile",
        config="forge_plugins_parallel.config:CompileConfig",
        phase="compile",
    )
    yield PassComponent(
        name="fsdp",
        summary="fully sharded data parallelism (FSDP2, HSDP) and mixed precision",
        factory="forge_plugins_parallel.fsdp:FullyShard",
        config="forge_plugins_parallel.config:FullyShardConfig",
        phase="fsdp",
        serves=("dp_replicate", "dp_shard", "precision"),
    )
