"""What this package registers. By name alone the two would stand the other way round, around the pass between them."""

from forge_core.api import Conflict, PassComponent, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_parallel_passes():
    yield PassComponent(
        name="label_blocks",
        summary="names each block in a profile, where it is computed again as well",
        factory="acme_passes.passes:LabelBlocks",
        config="acme_passes.config:LabelBlocksConfig",
        phase="checkpointing",
        before=("activation_checkpointing",),
        conflicts=(
            Conflict("compile", "a compiled block is one kernel after the other, and has no place for a label"),
        ),
    )
    yield PassComponent(
        name="acme_offload",
        summary="keeps the inputs of blocks that are computed again in the host's memory",
        factory="acme_passes.passes:OffloadInputs",
        config="acme_passes.config:OffloadInputsConfig",
        phase="checkpointing",
        after=("activation_checkpointing",),
        needs=("activation_checkpointing",),
    )
