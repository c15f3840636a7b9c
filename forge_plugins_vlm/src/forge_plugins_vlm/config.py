"""What can be set for the model ``vision_language``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import attrs
from attrs.validators import deep_iterable, ge, gt, optional

from forge_core.api import ComponentRef, Slot
from forge_core.errors import ConfigError
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_vlm.contracts.vision_encoder import Grid

if TYPE_CHECKING:
    from forge_core.config.sections import Job


@attrs.frozen(kw_only=True)
class VisionLanguageConfig(TransformerConfig):
    """A decoder that reads images among text. The keys of the decoder are those of the model ``transformer``, and so
    are the names of its parameters.

    A text run is loaded as it is, and into the image weights of ``mixture_of_transformers`` beside them, by::

        [[checkpoint.load]]
        path = "runs/text"

        [[checkpoint.load]]
        path = "runs/text"
        include = ["model.blocks.*"]
        rename = { "blocks.*.attention.*" = "blocks.*.image.attention.*", "blocks.*.attention_norm.*" =
            "blocks.*.image.attention_norm.*", "blocks.*.feed_forward.*" = "blocks.*.image.feed_forward.*",
            "blocks.*.feed_forward_norm.*" = "blocks.*.image.feed_forward_norm.*" }

    ``forge vlm upcycle`` does the same once and for all, also for ``moma``.
    """

    encoder: Annotated[ComponentRef, Slot("vision_encoder", default="conv_vit")]
    """What turns pixels into features."""
    connector: Annotated[ComponentRef, Slot("connector", default="mlp")]
    """What turns features into tokens of the decoder's width."""
    fusion: Annotated[ComponentRef, Slot("fusion", default="joint_decoder")]
    """How the decoder reads these tokens."""
    freeze_encoder: bool = False
    """Never train the encoder: it runs without gradients and in evaluation mode, and no optimizer has its parameters.
    For a part of the run, use ``[[phases]]``."""
    cut_encoder: bool = False
    """Cut the encoder's layers over ``parallel.tp``, as the decoder's are. Otherwise each of these ranks has the whole
    encoder and does all of its work, without talking to others."""
    encoded_sizes: tuple[Grid, ...] = attrs.field(default=(), validator=deep_iterable(deep_iterable(gt(0))))
    """Height and width in pixels of the tiles of a mixture whose sources give tiles of several sizes. The encoder takes
    each size by itself: the tiles of all rows are cut to it, encoded, and kept in rows of that size. Shapes do not
    depend on what a batch has, at the price of encoding once for each size."""
    newline: bool = False
    """Have a learned token that ends each row of an image, as the image processors ``anyres`` and ``tiles`` ask for."""

    input_tokens: int = attrs.field(default=0, validator=ge(0))
    """Tokens at the end of the vocabulary that are read and never predicted, such as the one that stands for an image:
    the head has no rows for them. Llama 3.2 Vision has 8."""
    image_token: int | None = attrs.field(default=None, validator=optional(ge(0)))
    """Id of the token that stands for an image, which ``forge convert`` writes for Hugging Face where the data of a run
    name no ``placeholder``."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this model in this job."""
        yield from super().check(job)
        if self.learned_positions and self.fusion.config.places_tokens:
            sentence = "an image token stands in the place of an embedding with its position, and would have none"
            yield "learned_positions", f"{sentence}; use rotary positions, or the fusion cross_attention"
        if self.n_predictors:
            yield "multi_token", "no embedding of an image is a token ahead; remove it"
        if self.input_tokens and self.tie_embeddings:
            yield "input_tokens", "a tied head has the rows of all tokens; set tie_embeddings = false"
        if self.vocab_size is not None and self.input_tokens >= self.vocab_size:
            yield "input_tokens", f"must be less than model.vocab_size = {self.vocab_size}, got {self.input_tokens}"
        if self.cut_encoder and (tp := job.parallel.tp) > 1:
            if not (heads := self.encoder.config.heads_to_cut):
                yield "cut_encoder", f"the layers of {self.encoder.name} cannot be cut; set cut_encoder = false"
            elif heads % tp:
                sentence = f"the {heads} heads of {self.encoder.name} cannot be shared out over parallel.tp = {tp}"
                yield "cut_encoder", f"{sentence}; set cut_encoder = false, or another parallel.tp"
        together = [[*sources] for sources in sources_of_batches(job)]
        for place, source in (one for sources in together for one in sources):
            yield from self._check_source(place, source)
        yield from self._check_sizes(together)

    def sizes_within(self, height: int, width: int) -> list[Grid]:
        """Those of ``encoded_sizes`` that a tile of so many pixels has room for."""
        return [size for size in self.encoded_sizes if size[0] <= height and size[1] <= width]

    def _check_source(self, place: str, source: Any) -> Iterator[tuple[str, str]]:
        """What does not fit in a source of images.

        Args:
            place: of its table, for messages.
        """
        height, width = source.processor.config.tile_size
        try:
            features = self.encoder.config.grid(height, width)
            grid = self.connector.config.grid(features)
        except ValueError as error:
            yield "encoder", f"{place}.processor gives tiles of {height} × {width} pixels: {error}"
            return
        except ConfigError:  # the encoder's files are not there, which its own check tells
            return
        (rows, columns), (said_rows, said_columns) = grid, source.token_grid
        if (said_rows, said_columns) != grid:
            sentence = f"gives {rows} × {columns} = {rows * columns} tokens for a tile, and {place}.token_grid says "
            yield "connector", f"{sentence}{said_rows * said_columns}; set {place}.token_grid = [{rows}, {columns}]"
        places = self.fusion.config.places_tokens
        if places and source.one_token_an_image:
            sentence = f"{self.fusion.name} puts all tokens of an image among those of text"
            yield "fusion", f"{sentence}; set {place}.one_token_an_image = false"
        if source.processor.config.has_newlines and places and not self.newline:
            yield "newline", f"{place}.processor ends the rows of an image with a learned token; set newline = true"
        if source.processor.config.pads:
            yield from self._check_padded(place, source, height // features[0])

    def _check_padded(self, place: str, source: Any, patch: int) -> Iterator[tuple[str, str]]:
        """What does not fit in a source of padded tiles.

        Args:
            patch: height of what a feature of the encoder is of, in pixels.
        """
        if getattr(self.fusion.config, "mrope_sections", None) is not None:
            sentence = f"counts rows and columns of whole tiles, and {place}.processor gives padded ones"
            yield "fusion.mrope_sections", f"{sentence}; use another processor, or remove it"
        if not self.fusion.config.places_tokens:
            sentence = f"{self.fusion.name} sees whole tiles, and {place}.processor gives padded ones"
            yield "fusion", f"{sentence}; use another processor, or a fusion that places the tokens of images"
        if not self.encoder.config.takes_padding:
            sentence = f"{self.encoder.name} cannot leave out the padding of tiles, which {place}.processor gives"
            yield "encoder", f"{sentence}; siglip2_naflex can"
        elif getattr(source.processor.config, "patch", patch) % patch:
            sentence = (
                f"has patches of {patch} pixels, which are part picture, part padding with {place}.processor.patch"
            )
            yield "encoder", f"{sentence} = {source.processor.config.patch}; set that to {patch}"
        if not self.connector.config.takes_padding:
            sentence = f"a token of {self.connector.name} stands for all of a tile, and {place}.processor gives padded"
            yield "connector", f"{sentence} ones; use another processor, or another connector, such as mlp"

    def _check_sizes(self, together: Sequence[Sequence[tuple[str, Any]]]) -> Iterator[tuple[str, str]]:
        """Sizes of tiles that are in batches with others, and padding that some of their tiles have.

        Args:
            together: sources of images, by the batches that they are in.
        """
        needed: set[Grid] = set()
        for sources in together:
            sizes = {tuple(source.processor.config.tile_size): place for place, source in sources}
            needed |= sizes.keys() if len(sizes) > 1 else set()
            padded = {source.processor.config.pads: place for place, source in sources}
            if len(padded) > 1:
                sentence = (
                    f"{padded[True]}.processor gives padded tiles, and {padded[False]}.processor gives whole ones"
                )
                yield "encoder", f"{sentence}; those of one batch are alike, so use one of the two for both"
        said = ", ".join(f"[{height}, {width}]" for height, width in sorted(needed))
        if missing := needed - {*self.encoded_sizes}:
            height, width = min(missing)
            sentence = f"sources give tiles of several sizes to one batch, and {height} × {width} is not here"
            yield "encoded_sizes", f"{sentence}; set model.encoded_sizes = [{said}]"
        for height, width in dict.fromkeys(self.encoded_sizes):
            if self.encoded_sizes.count((height, width)) > 1:
                yield "encoded_sizes", f"names [{height}, {width}] twice, and it would be encoded twice; name it once"
            if (height, width) not in needed:
                sentence = f"no source gives tiles of {height} × {width} pixels to a batch that has others, too"
                yield "encoded_sizes", f"{sentence}; {f'set it to [{said}]' if needed else 'remove it'}"


def sources_of_batches(job: Job) -> Iterator[Iterator[tuple[str, Any]]]:
    """The configs of sources of images, as ``image_sources`` has them, together where batches may have several: those
    that are trained on, and the ones that are measured."""
    yield image_sources(job.data.config, "data")
    if job.eval.data is not None:
        yield image_sources(job.eval.data.config, "eval.data")
    for number, use in enumerate(job.evaluations):
        yield image_sources(use.config, f"evaluations[{number}]")


def image_sources(config: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The configs of sources of images, in a source's config or in those within it, as of a mixture.

    Args:
        place: the key of ``config``.
    """
    if hasattr(config, "token_grid"):
        yield place, config
        return
    if not attrs.has(type(config)):
        return
    for field in attrs.fields(type(config)):
        value = getattr(config, field.name)
        within = value if isinstance(value, tuple | list) else (value,)
        for number, one in enumerate(within):
            key = f"{place}.{field.name}" + (f"[{number}]" if isinstance(value, tuple | list) else "")
            if isinstance(one, ComponentRef):
                yield from image_sources(one.config, key)
            elif attrs.has(type(one)):
                yield from image_sources(one, key)
