"""Passes whose declarations cannot be true. They are installed beside others, and hurt only the jobs that name them."""

from forge_core.api import PassComponent, hookimpl

FORGE_API = "1.0"


def labels(name, **declared):
    return PassComponent(
        name=name,
        summary="names each block in a profile, at a place that does not exist",
        factory="acme_passes.passes:LabelBlocks",
        config="acme_passes.config:LabelBlocksConfig",
        **declared,
    )


@hookimpl
def forge_parallel_passes():
    yield labels("against_the_phases", phase="shard", after=("fsdp",))
    yield labels("in_a_circle", phase="checkpointing", after=("activation_checkpointing",), before=("label_blocks",))
    yield labels("without_its_neighbour", phase="swap", needs=("adapters",))
