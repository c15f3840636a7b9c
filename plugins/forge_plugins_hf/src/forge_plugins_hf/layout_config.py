"""The keys of weight layouts."""

import attrs


@attrs.frozen(kw_only=True)
class LayoutConfig:
    """A layout has no keys; a class of one's own may have some, each with a default."""
