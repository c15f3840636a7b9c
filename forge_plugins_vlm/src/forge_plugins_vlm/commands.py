"""``forge vlm``: image tasks, and what a vision-language model sees and says.

Each sub-command is imported when it is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click

_COMMANDS: Mapping[str, tuple[str, str]] = {
    "generate": ("forge_plugins_vlm.generate_command:generate", "Say something about images."),
    "inspect": ("forge_plugins_vlm.inspect_command:inspect", "Write the images and the text of a step as a page."),
    "prepare-coco": ("forge_plugins_vlm.task_commands:prepare_coco", "Write captions of COCO as rows."),
    "shapes": ("forge_plugins_vlm.task_commands:shapes", "Draw the shapes task: pictures with captions."),
    "upcycle": (
        "forge_plugins_vlm.upcycle_command:upcycle",
        "Give each modality weights of its own, from a trained run.",
    ),
    "words": ("forge_plugins_vlm.task_commands:words", "Draw words to be transcribed."),
}
"""By name: where it is, and what the list of commands says."""


class _LazyGroup(click.Group):
    """A group that imports its commands when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in sorted(_COMMANDS.items())])


@click.group(cls=_LazyGroup)
def vlm() -> None:
    """Draw image tasks, and look at what a vision-language model sees."""
