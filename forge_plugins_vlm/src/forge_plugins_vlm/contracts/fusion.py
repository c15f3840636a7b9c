"""Fusions: how a decoder reads images.

Shapes: B = batch, S = sequence, D = width of the residual stream, F = image tokens of a row, over all of its tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import attrs

if TYPE_CHECKING:
    from torch import nn

    from forge_core.config.sections import Job
    from forge_core.contracts.builder import Builder
    from forge_plugins_vlm.config import VisionLanguageConfig

Axis = Literal["tp", "pp", "cp", "ep"]
FACTS = frozenset({"image_range", "image_slots", "image_tile", "image_tokens", "noise", "sequence", "token_ids"})
"""What blocks can ask for by their ``needs``. The last three are those of feed-forward layers."""


@attrs.frozen(kw_only=True)
class FusionConfig:
    """What is known of a fusion before it is built. Config classes of fusions extend this one."""

    places_tokens: ClassVar[bool] = True
    """Whether tokens of images take the place of the embeddings of their positions, so that an image has a position in
    the text for each of its tokens. Otherwise one position an image is enough (``data.one_token_an_image``)."""
    unsupported: ClassVar[Mapping[Axis, str]] = {}
    """Axes that it does not run on, each with the reason. ``forge validate`` refuses them; a table in the docs has
    them."""

    def flops_of_images(self, layer: int, model: VisionLanguageConfig, image_tokens: int, positions: int) -> float:
        """FLOPs of the forward of one row in a layer, beyond what its block counts for each position, by
        ``active_parameters`` and ``active_image_parameters``.

        Args:
            image_tokens: F of the row, with the ones that fill it up.
            positions: S.
        """
        return 0.0

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this fusion in this job: key within its own section, and a sentence."""
        for axis, reason in self.unsupported.items():
            if (degree := getattr(job.parallel, axis)) > 1:
                yield "", f"parallel.{axis} = {degree}: {reason}; set parallel.{axis} = 1"


class Fusion(Protocol):
    """Makes the blocks of a decoder that reads images."""

    def block(self, layer: int) -> nn.Module:
        """The block of a layer: what ``forge_plugins_dense.block.Block`` is, with all of its methods, and a module
        ``attention``, which makes the layer's cache, if it has ``make_cache``.

        Its forward is given ``(hidden, surroundings, cache)``. ``surroundings.facts`` has what it names in its
        ``needs``: the entries ``image_slots`` ``(B, S)`` and ``image_range`` ``(B, S, 3)`` of the batch
        (``forge_plugins_vlm.contracts.entries``); ``image_tokens`` ``(B, F, D)``, which travel between pipeline stages
        for it; and ``image_tile`` ``(F,)`` int64, the tile of each, or ``(B, F)`` where rows have tiles of
        several sizes. While text is generated, they are there in each forward; ``LayerCache.beside`` keeps what a
        block makes of them.

        A block whose ``active_parameters`` are those of a token of text alone has ``active_image_parameters() -> int``:
        those of a token of an image. Each token then counts by its modality, also where a block multiplies by the
        weights of both and keeps one product. Without it, both have as many.

        A block may have a method ``parameter_aliases() -> Mapping[str, Sequence[str]]``: patterns of the names of its
        parameters that are not the decoder's own, by the name of a group, such as ``image``. These are then groups of
        the model (``AliasedModel``), and the other parameters of the block belong to ``@decoder``.
        """
        ...


class FusionFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, model: VisionLanguageConfig, build: Builder) -> Fusion:
        """Build the fusion.

        Args:
            config: extends ``FusionConfig``.
            model: of which the decoder's keys are those of ``forge_plugins_dense``.
            build: builds the components within a block.
        """
        ...
