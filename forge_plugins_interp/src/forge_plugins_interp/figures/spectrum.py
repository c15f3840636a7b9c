"""Spectra of sites as curves: the share of variance of each principal component, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from forge_plugins_interp.figures.blank import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from forge_plugins_interp.spectrum import Spectrum


def spectra_figure(spectra: Mapping[str, Spectrum]) -> Figure:
    """
    Args:
        spectra: by site, in the order of the colors, from dark to light.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = blank(5.6, 3.8)
    from matplotlib import colormaps

    axes, colors = figure.subplots(), colormaps["viridis"]
    for number, (site, spectrum) in enumerate(spectra.items()):
        shares = spectrum.variances / spectrum.variances.sum()
        known = shares[: spectrum.rows - 1]
        color = colors(number / max(1, len(spectra)))
        axes.loglog(range(1, len(known) + 1), known, color=color, linewidth=1, label=site)
    axes.set_xlabel("principal component")
    axes.set_ylabel("share of the variance")
    axes.set_ylim(bottom=1e-8, top=1.5)
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
