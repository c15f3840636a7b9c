"""Configuration of the components of ``plugin.py`` that have none of their own."""

import attrs


@attrs.frozen(kw_only=True)
class NothingToChoose:
    """No keys."""
