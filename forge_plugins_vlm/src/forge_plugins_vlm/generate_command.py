"""``forge vlm generate``: what a model says about images."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.config.describe import printable
from forge_core.errors import ConfigError
from forge_core.job import catalog_of

if TYPE_CHECKING:
    from forge_core.contracts.command import Invocation
    from forge_core.contracts.model import GenerativeModel
    from forge_plugins_vlm.data.config import ImageTextConfig
    from forge_plugins_vlm.data.prompts import Prompt, PromptReader
    from forge_plugins_vlm.data.references import Reference
    from forge_plugins_weights.loading import LoadedModel, Weights

VIDEO = "<video>"
"""In a prompt: the frames of a video."""


@attrs.frozen(kw_only=True)
class ContinuedPrompt:
    """A prompt about images, and what the model has made of it."""

    prompt: str
    """With a placeholder for each image."""
    images: int
    """Their number; a frame of a video counts as one."""
    text: str
    """What follows the prompt."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--image", "images", multiple=True, type=click.Path(path_type=Path), help="An image; repeat for more.")
@click.option(
    "--video", "videos", multiple=True, type=click.Path(path_type=Path), help="A video, or frames in a folder."
)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    help="Text, with the placeholder of the data, such as <image>, for each image and <video> for each video; repeat "
    "for a batch, which takes images in order. By default all images, without words.",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="By default 64, or as many as there is room for.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0), help="0: the likeliest.")
@click.option("--top-k", default=0, show_default=True, type=click.IntRange(min=0), help="Of the likeliest; 0: all.")
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(min=0, max=1, min_open=True))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0, max=2**63 - 1))
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda", "mps"]))
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16", "float16"]))
@click.option(
    "--weights", type=click.Choice(["training", "evaluation"]), help="By default averages, if the run has any."
)
@json_option(ContinuedPrompt, lines=True, says="Print JSON, an object for each prompt on a line.")
@click.pass_obj
def generate(
    invocation: Invocation,
    run: Path,
    images: tuple[Path, ...],
    videos: tuple[Path, ...],
    prompts: tuple[str, ...],
    max_new_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    device: str,
    dtype: str,
    weights: Weights | None,
    as_json: bool,
) -> None:
    """Continue prompts about images by the model of RUN, a run's directory (its newest checkpoint) or a checkpoint's.

    Images are processed as the ones that it was trained on.
    """
    import torch

    from forge_core.checkpoint.contents import model_problem
    from forge_core.checkpoint.store import find_checkpoint
    from forge_core.distributed.mesh import choose_device
    from forge_plugins_inference.generation import generate as sample
    from forge_plugins_weights.loading import load_model

    checkpoint = find_checkpoint(run, _say, model_problem)
    place = choose_device(device, "--device")
    loaded = load_model(checkpoint, invocation.catalog, place, getattr(torch, dtype), weights)
    reader, config = _reader(loaded, invocation)
    read = _prompts(reader, config, images, videos, prompts)
    assert loaded.tokenizer is not None, "without one, there is no reader"
    model = cast("GenerativeModel", loaded.model)
    room = model.max_seq_len - max(len(one.tokens) for one in read)
    found = sample(
        model,
        [one.tokens for one in read],
        max_new_tokens=max_new_tokens or max(1, min(64, room)),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=loaded.tokenizer.end_of_document,
        generator=torch.Generator(place).manual_seed(seed),
        inputs=reader.entries(read),
        forbidden=reader.forbidden,
        has_ended=reader.answer_end.has_come,
    )
    for number, (prompt, tokens) in enumerate(zip(read, found, strict=True), start=1):
        text = reader.answer_end.text_before(tokens)
        if as_json:
            print_json(ContinuedPrompt(prompt=prompt.text, images=len(prompt.images), text=text), indent=None)
            continue
        if len(read) > 1:
            print(f"--- {number} of {len(read)}")
        print(printable(text) if sys.stdout.isatty() else text)


def _reader(loaded: LoadedModel, invocation: Invocation) -> tuple[PromptReader, ImageTextConfig]:
    """
    Raises:
        ConfigError: the model was not trained on images, or not on those of ``image_text``.
    """
    from forge_core.config.builder import ComponentBuilder
    from forge_plugins_vlm.data.prompts import PromptReader
    from forge_plugins_vlm.sampling import image_text_of

    config = image_text_of(loaded.job)
    if config is None or loaded.tokenizer is None:
        raise ConfigError(
            f"the data of this run, {loaded.job.data.name}, have no images (image_text), and so do not say how to read "
            "them; forge generate continues text"
        )
    build = ComponentBuilder(catalog_of(loaded.job, invocation.catalog))
    return PromptReader(config, loaded.tokenizer, build(config.processor)), config


def _prompts(
    reader: PromptReader,
    config: ImageTextConfig,
    images: Sequence[Path],
    videos: Sequence[Path],
    texts: Sequence[str],
) -> list[Prompt]:
    """
    Raises:
        ConfigError: placeholders of all texts differ in number from images or videos.
    """
    frames = [_frames(video, config) for video in videos]
    given: list[Reference] = [_picture(image) for image in images]
    texts = texts or [reader.usual_text(len(given) + sum(map(len, frames)))]
    if len(texts) == 1 and VIDEO not in texts[0]:
        given = [*given, *(frame for video in frames for frame in video)]
        frames = []
    for sign, there, kind in ((config.placeholder, given, "--image"), (VIDEO, frames, "--video")):
        asked = sum(text.count(sign) for text in texts)
        if asked != len(there):
            raise ConfigError(f"--prompt: has {asked} placeholders {sign!r}, and {kind} gives {len(there)} of them")
    read, left_images, left_videos = [], iter(given), iter(frames)
    for number, text in enumerate(texts, start=1):
        own: list[Reference] = []
        written = ""
        for piece in _pieces(text, config.placeholder):
            if piece == config.placeholder:
                own.append(next(left_images))
            elif piece == VIDEO:
                video = next(left_videos)
                own += video
                piece = config.placeholder * len(video)
            written += piece
        read.append(reader(written, own, f"--prompt {number}"))
    return read


def _pieces(text: str, placeholder: str) -> list[str]:
    """The text, cut around placeholders."""
    found = [text]
    for sign in (placeholder, VIDEO):
        cut: list[str] = []
        for piece in found:
            for number, part in enumerate(piece.split(sign) if piece != placeholder else [piece]):
                cut += [sign, part] if number else [part]
        found = cut
    return [piece for piece in found if piece]


def _picture(path: Path) -> Reference:
    from forge_plugins_vlm.data.references import PictureFile

    if not path.is_file():
        raise ConfigError(f"--image: {path} is no file")
    return PictureFile(path, path.name)


def _frames(path: Path, config: ImageTextConfig) -> Sequence[Reference]:
    from forge_plugins_vlm.data.video import frames_of

    if not path.exists():
        raise ConfigError(f"--video: {path} is not there")
    return frames_of(path, {}, "--video", config)


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr)
