"""What this package registers. Every forge command imports this file: keep it free of torch."""

from collections.abc import Iterable

from forge_core.api import PassComponent, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_parallel_passes() -> Iterable[PassComponent]:
    yield PassComponent(
        name="activation_checkpointing",
        summary="computes activations again instead of keeping them: all, some, or as few as memory allows",
        factory="forge_plugins_parallel.activation_checkpointing:ActivationCheckpointing",
        config="forge_plugins_parallel.config:ActivationCheckpointingConfig",
        phase="checkpointing",
    )
    yield PassComponent(
        name="compile",
        summary="torch.compile for each block, so that compile time does not grow with depth",
        factory="forge_plugins_parallel.compile:Compile",
        config="forge_plugins_parallel.config:CompileConfig",
        phase="compile",
    )
    yield PassComponent(
        name="context_parallel",
        summary="context parallelism: sequences shared out over ranks, keys and values gathered",
        factory="forge_plugins_parallel.context_parallel:ContextParallel",
        config="forge_plugins_parallel.config:ContextParallelConfig",
        phase="shard",
        needs=("fsdp",),
        serves=("cp",),
    )
    yield PassComponent(
        name="fp8",
        summary="linear layers of blocks in float8 (torchao): tensorwise and rowwise scales",
        factory="forge_plugins_parallel.fp8:Float8",
        config="forge_plugins_parallel.config:Float8Config",
        phase="swap",
        modules=("torchao",),
    )
    yield PassComponent(
        name="fsdp",
        summary="fully sharded data parallelism (FSDP2, HSDP) and mixed precision",
        factory="forge_plugins_parallel.fsdp:FullyShard",
        config="forge_plugins_parallel.config:FullyShardConfig",
        phase="fsdp",
        serves=("dp_replicate", "dp_shard", "precision"),
    )
    yield PassComponent(
        name="pipeline",
        summary="pipeline parallelism: stages of blocks, six schedules",
        factory="forge_plugins_parallel.pipeline:Pipeline",
        config="forge_plugins_parallel.config:PipelineConfig",
        phase="split",
        serves=("pp",),
    )
    yield PassComponent(
        name="tensor_parallel",
        summary="tensor and sequence parallelism, and the vocabulary cut for embedding, head and loss",
        factory="forge_plugins_parallel.tensor_parallel:TensorParallel",
        config="forge_plugins_parallel.config:TensorParallelConfig",
        phase="shard",
        serves=("tp",),
    )
