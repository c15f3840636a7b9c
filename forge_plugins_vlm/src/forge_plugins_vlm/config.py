"""What can be set for the model ``vision_language``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import attrs
from attrs.validators import ge, optional

from forge_core.api import ComponentRef, Slot
from forge_plugins_dense.config import TransformerConfig

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
        for key, sentence in self.fusion.config.check(job):
            yield ".".join(filter(None, ("fusion", key))), sentence
        trained = [*image_sources(job.data.config, "data")]
        for place, source in [*trained, *_measured_sources(job)]:
            yield from self._check_source(place, source)
        yield from _refuse_several_sizes(trained)

    def _check_source(self, place: str, source: Any) -> Iterator[tuple[str, str]]:
        """What does not fit in a source of images.

        Args:
            place: of its table, for messages.
        """
        height, width = source.processor.config.tile_size
        try:
            grid = self.connector.config.grid(self.encoder.config.grid(height, width))
        except ValueError as error:
            yield "encoder", f"{place}.processor gives tiles of {height} × {width} pixels: {error}"
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
        if source.processor.config.pads and getattr(self.fusion.config, "mrope_sections", None) is not None:
            sentence = f"counts rows and columns of whole tiles, and {place}.processor gives padded ones"
            yield "fusion.mrope_sections", f"{sentence}; use another processor, or remove it"
        if source.processor.config.pads and not places:
            sentence = f"{self.fusion.name} sees whole tiles, and {place}.processor gives padded ones"
            yield "fusion", f"{sentence}; use another processor, or a fusion that places the tokens of images"
        if source.processor.config.pads and not self.encoder.config.takes_padding:
            sentence = f"{self.encoder.name} cannot leave out the padding of tiles, which {place}.processor gives"
            yield "encoder", f"{sentence}; siglip2_naflex can"


def _measured_sources(job: Job) -> Iterator[tuple[str, Any]]:
    """The configs of sources of images that are not trained on, as ``image_sources`` has them."""
    if job.eval.data is not None:
        yield from image_sources(job.eval.data.config, "eval.data")
    for number, use in enumerate(job.evaluations):
        yield from image_sources(use.config, f"evaluations[{number}]")


def _refuse_several_sizes(sources: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Tiles of a batch are one array; those of another size would be filled up, and their tokens be others."""
    for place, source in sources[1:]:
        first, (height, width) = sources[0], source.processor.config.tile_size
        if (height, width) != (wanted := first[1].processor.config.tile_size):
            sentence = f"{place}.processor gives tiles of {height} × {width} pixels, and {first[0]}.processor of"
            yield "encoder", f"{sentence} {wanted[0]} × {wanted[1]}; those of one batch have one size"


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
