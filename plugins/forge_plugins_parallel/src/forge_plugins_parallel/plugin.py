"""What this package registers. Every forge command imports this file: keep it free of torch."""

from collections.abc import Iterable

from forge_core.api import Conflict, Need, PassComponent, hookimpl

FORGE_API = "1.0"

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that run a stage's backward in two halves, first for its input, then for its weights."""


@hookimpl
def forge_parallel_passes() -> Iterable[PassComponent]:
    yield PassComponent(
        name="activation_checkpointing",
        summary="recomputes activations (all, some, or as few as memory allows), or keeps them in the host's memory",
        factory="forge_plugins_parallel.activation_checkpointing:ActivationCheckpointing",
        config="forge_plugins_parallel.config:ActivationCheckpointingConfig",
        phase="checkpointing",
        compared=({"mode": "selective"}, {"mode": "full"}),
        needs=(Need("compile", "it is torch.compile that keeps to the budget", when={"mode": "budget"}),),
        conflicts=(
            Conflict(
                "run.device",
                "it takes activations off a CUDA device",
                when={"mode": "offload"},
                values=("cpu", "mps"),
            ),
            Conflict(
                "parallel.pp",
                "there is no telling how many microbatches a pipeline stage holds at a time; choose another mode",
                when={"mode": "auto"},
            ),
        ),
    )
    yield PassComponent(
        name="compile",
        summary="torch.compile for each block, so that compile time does not grow with depth",
        factory="forge_plugins_parallel.compile:Compile",
        config="forge_plugins_parallel.config:CompileConfig",
        phase="compile",
        conflicts=(
            Conflict(
                "fsdp",
                "it gathers and frees parameters between blocks, which one graph has no room for",
                when={"whole_model": True},
            ),
            Conflict(
                "activation_checkpointing",
                "what is saved is sent away block by block, and one graph saves all at once",
                when={"whole_model": True},
                other_when={"mode": "offload"},
            ),
        ),
    )
    yield PassComponent(
        name="context_parallel",
        summary="context parallelism: sequences shared out over ranks, keys and values gathered or in a ring",
        factory="forge_plugins_parallel.context_parallel:ContextParallel",
        config="forge_plugins_parallel.config:ContextParallelConfig",
        phase="shard",
        needs=("fsdp",),
        conflicts=(
            Conflict(
                "run.device",
                "results are merged by sums that its attention kernels do not give",
                when={"method": "ring"},
                values=("mps",),
            ),
        ),
        serves=("cp",),
    )
    yield PassComponent(
        name="fp8",
        summary="linear layers of blocks in float8 (torchao), scales per tensor, row or block; experts too if asked",
        factory="forge_plugins_parallel.fp8:Float8",
        config="forge_plugins_parallel.config:Float8Config",
        phase="swap",
        needs=(Need("fsdp", "it is what gathers", when={"all_gather": True}),),
        conflicts=(
            Conflict("parallel.tp", "torchao cannot gather what is cut by it already", when={"all_gather": True}),
            Conflict(
                "train.precision",
                "torchao's products of float8 come out in bf16",
                values=("fp32", "fp16"),
                when={"emulate": False},
            ),
        ),
        modules=("torchao",),
    )
    yield PassComponent(
        name="fsdp",
        summary="fully sharded data parallelism (FSDP2, HSDP) and mixed precision",
        factory="forge_plugins_parallel.fsdp:FullyShard",
        config="forge_plugins_parallel.config:FullyShardConfig",
        phase="fsdp",
        serves=("dp_replicate", "dp_shard", "precision"),
        conflicts=(
            Conflict("parallel.pp", "a pipeline keeps parameters gathered by itself", when={"keep_gathered": True}),
            Conflict("parallel.pp", "a pipeline reduces gradients once a step", when={"accumulate": "sharded"}),
            Conflict(
                "run.device",
                "it takes parameters off a CUDA device",
                when={"cpu_offload": True},
                values=("cpu", "mps"),
            ),
            Conflict(
                "activation_checkpointing",
                "it counts parameters, gradients and the optimizer's state as memory of the GPU",
                when={"cpu_offload": True},
                other_when={"mode": "auto"},
            ),
            Conflict(
                "fp8",
                "float8 weights are tensors of torchao's, which have not been tried in the host's memory",
                when={"cpu_offload": True},
                other_when={"all_gather": True},
            ),
        ),
    )
    yield PassComponent(
        name="lora",
        summary="low-rank adapters (LoRA): trains two narrow matrices beside each linear layer, and nothing else",
        factory="forge_plugins_parallel.lora:Lora",
        config="forge_plugins_parallel.config:LoraConfig",
        phase="swap",
        after=("fp8",),
        adds_parameters=True,
    )
    yield PassComponent(
        name="pipeline",
        summary="pipeline parallelism: stages of blocks, six schedules and your own",
        factory="forge_plugins_parallel.pipeline:Pipeline",
        config="forge_plugins_parallel.config:PipelineConfig",
        phase="split",
        conflicts=(
            Conflict(
                "fsdp",
                "the schedule comes back to parameters after a backward for inputs, when they would be freed",
                when={"schedule": SPLIT_BACKWARD},
                other_when={"reshard_after_forward": "always"},
            ),
        ),
        serves=("pp",),
    )
    yield PassComponent(
        name="tensor_parallel",
        summary="tensor and sequence parallelism, and the vocabulary cut for embedding, head and loss",
        factory="forge_plugins_parallel.tensor_parallel:TensorParallel",
        config="forge_plugins_parallel.config:TensorParallelConfig",
        phase="shard",
        serves=("tp",),
        needs=(
            Need(
                "compile",
                "it is the compiler that finds the products and cuts them up",
                when={"async_tp": True},
            ),
        ),
        conflicts=(
            Conflict(
                "run.device",
                "ranks write into each other's memory by CUDA",
                when={"async_tp": True},
                values=("cpu", "mps"),
            ),
            Conflict(
                "fp8",
                "what is gathered is rounded before it is multiplied, so that the two cannot be made one",
                when={"async_tp": True},
            ),
        ),
    )
