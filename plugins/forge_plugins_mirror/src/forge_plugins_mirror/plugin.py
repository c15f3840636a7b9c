"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Component, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_checkpoint_mirrors() -> Iterable[Component]:
    """The mirror on any file system of fsspec, that in the memory of the nodes, and several at once."""
    yield Component(
        name="fsspec",
        summary="checkpoints copied in the background to a path, or a URL that fsspec knows",
        factory="forge_plugins_mirror.fsspec_mirror:FsspecMirror",
        config="forge_plugins_mirror.config:FsspecMirrorConfig",
    )
    yield Component(
        name="host_memory",
        summary="checkpoints every few steps in the memory of each node, with a copy on the next node",
        factory="forge_plugins_mirror.host_memory.mirror:HostMemory",
        config="forge_plugins_mirror.config:HostMemoryConfig",
    )
    yield Component(
        name="several",
        summary="each checkpoint copied to several mirrors, such as the memory of the nodes and a bucket",
        factory="forge_plugins_mirror.several:SeveralMirrors",
        config="forge_plugins_mirror.config:SeveralMirrorsConfig",
    )
