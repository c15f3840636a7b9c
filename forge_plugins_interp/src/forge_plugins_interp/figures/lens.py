"""What each layer would predict at each position, coloured by how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge_plugins_interp.figures.blank import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from forge_plugins_interp.tidy_table import Row


def lens_figure(rows: Sequence[Row], words: Sequence[str]) -> Figure:
    """
    Args:
        rows: of ``lens_rows``, one for each site and position.
        words: of the prompt.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    sites = list(dict.fromkeys(row["site"] for row in rows))
    entropy = [[row["entropy"] for row in rows if row["site"] == site] for site in sites]
    figure = blank(2.4 + 0.55 * len(words), 1.4 + 0.3 * len(sites))
    axes = figure.subplots()
    image = axes.imshow(entropy, cmap="viridis_r", origin="lower", aspect="auto")
    middle = (min(map(min, entropy)) + max(map(max, entropy))) / 2
    for row in rows:
        shown = repr(row["predicted"])[1:-1]
        light = "white" if row["entropy"] > middle else "black"
        place = (row["position"], sites.index(row["site"]))
        axes.text(*place, shown, ha="center", va="center", fontsize=6, color=light)
    axes.set_yticks(range(len(sites)), sites, fontsize=6)
    axes.set_xticks(range(len(words)), [repr(word)[1:-1] for word in words], fontsize=7)
    axes.set_xlabel("prompt")
    figure.colorbar(image, ax=axes, label="entropy (nats)")
    return figure
