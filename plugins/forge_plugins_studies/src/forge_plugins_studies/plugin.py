"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Command, Component, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_commands() -> Iterable[Command]:
    """``forge sweep`` and ``forge coordinate-check``."""
    yield Command(
        name="sweep",
        summary="train a job for each value of a key, one after the other or side by side",
        run="forge_plugins_studies.command:sweep",
    )
    yield Command(
        name="coordinate-check",
        summary="compare the sizes of activations in models of several widths and depths",
        run="forge_plugins_studies.coordinate_check:coordinate_check",
    )


@hookimpl
def forge_callbacks() -> Iterable[Component]:
    """What ``forge coordinate-check`` measures by."""
    yield Component(
        name="coordinates",
        summary="how large activations are, and how far training has moved them, on one process",
        factory="forge_plugins_studies.coordinates:Coordinates",
        config="forge_plugins_studies.config:CoordinatesConfig",
    )


@hookimpl(optionalhook=True)
def forge_report_sections() -> Iterable[Component]:
    """A part of the page of forge-plugins-monitor."""
    yield Component(
        name="coordinates",
        summary="how far training moves activations, against width and depth",
        factory="forge_plugins_studies.coordinates_section:CoordinatesSection",
    )
