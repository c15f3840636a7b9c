"""Keys of the passes."""

import attrs


@attrs.frozen(kw_only=True)
class CompileConfig:
    """``[parallel.passes.compile]``."""

    mode: str = attrs.field(
        default="default",
        validator=attrs.validators.in_(
            ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        ),
    )
    """torch.compile's mode: what to spend compile time on."""
    fullgraph: bool = True
    """Refuse graph breaks inside a block, with torch's explanation, instead of running slower."""


@attrs.frozen(kw_only=True)
class FullyShardConfig:
    """``[parallel.passes.fsdp]``."""

    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward and gather them again in backward: less memory, more
    communication. The last unit (norm, head, embedding) always keeps them, since backward starts there."""
