"""``forge vlm shapes`` and ``forge vlm words``: tasks that are drawn; ``forge vlm prepare-coco``: one that is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def _sizes(command: Callable[..., None]) -> Callable[..., None]:
    """The options of tasks."""
    options: list[Any] = [
        click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write to."),
        click.option(
            "--train", default=4096, show_default=True, type=click.IntRange(min=1), help="Samples for training."
        ),
        click.option("--held-out", default=512, show_default=True, type=click.IntRange(min=1), help="Samples beside."),
        click.option(
            "--seed", default=0, show_default=True, type=click.IntRange(min=0), help="The same, the same files."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@_sizes
@click.option(
    "--task",
    default="captions",
    show_default=True,
    type=click.Choice(["captions", "two_images", "motion", "binding"]),
    help="Captions of one picture; or questions about two, about a video, and about two things of one picture.",
)
def shapes(out: Path, train: int, held_out: int, seed: int, task: str) -> None:
    """Draw coloured shapes of 32 × 32 pixels, and write them with conversations.

    OUT has train.json and held_out.json as LLaVA has them (of motion, .jsonl of messages), tokenizer.json, and
    captions.txt, the captions of the training part alone. Other tasks than captions have a control beside the held-out
    part, whose answers are others.
    """
    from forge_plugins_vlm.tasks.extensions import EXTENSIONS
    from forge_plugins_vlm.tasks.shapes import write_shapes

    write = write_shapes if task == "captions" else EXTENSIONS[task]
    write(out, train=train, held_out=held_out, seed=seed)
    click.echo(f"{out}: {train:,} samples for training, {held_out:,} held out")


@click.command()
@_sizes
def words(out: Path, train: int, held_out: int, seed: int) -> None:
    """Draw words of the standard library's source with Pillow's own font, 64 × 32 pixels, to be transcribed.

    OUT has train.json, held_out.json, whose words are in no other part, captions.txt and a tokenizer.json of letters.
    """
    from forge_plugins_vlm.tasks.words import write_words

    write_words(out, train=train, held_out=held_out, seed=seed)
    click.echo(f"{out}: {train:,} samples for training, {held_out:,} held out")


@click.command("prepare-coco")
@click.argument("annotations", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--images",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with train2014 and val2014.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write to.")
@click.option("--split", "splits", default=("test",), show_default=True, multiple=True, help="Split to write.")
@click.option("--all-splits", is_flag=True, help="Write all splits instead.")
@click.option(
    "--samples", default=500, show_default=True, type=click.IntRange(min=0), help="Most images of a split; 0: all."
)
def prepare_coco(
    annotations: Path, images: Path, out: Path, splits: tuple[str, ...], all_splits: bool, samples: int
) -> None:
    """Write captions of COCO as rows: ANNOTATIONS is dataset_coco.json of Karpathy.

    OUT has a .jsonl for each split, of the format captions: a line for each caption, with the name of its image, all
    captions of that as references, and its image_id. Images stay where they are: name their folder as data.images.
    """
    from forge_plugins_vlm.tasks.coco import write_coco

    written = write_coco(annotations, images, out, splits=() if all_splits else splits, samples=samples)
    for split, n_images in written.items():
        click.echo(f"{out / split}.jsonl: captions of {n_images:,} images")
