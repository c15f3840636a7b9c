"""Configuration of report sections. This module does not import torch."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class SectionConfig:
    """Our sections have no keys."""
