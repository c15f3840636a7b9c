"""What can be set for the model ``vision_language``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import attrs

from forge_core.api import ComponentRef, Slot
from forge_plugins_dense.config import TransformerConfig

if TYPE_CHECKING:
    from forge_core.config.sections import Job


@attrs.frozen(kw_only=True)
class VisionLanguageConfig(TransformerConfig):
    """A decoder that reads images among text. The keys of the decoder are those of the model ``transformer``, and so
    are the names of its parameters."""

    encoder: Annotated[ComponentRef, Slot("vision_encoder", default="conv_vit")]
    """What turns pixels into features."""
    connector: Annotated[ComponentRef, Slot("connector", default="mlp")]
    """What turns features into tokens of the decoder's width."""
    fusion: Annotated[ComponentRef, Slot("fusion", default="joint_decoder")]
    """How the decoder reads these tokens."""
    freeze_encoder: bool = False
    """Never train the encoder: it runs without gradients and in evaluation mode, and no optimizer has its parameters.
    For a part of the run, use ``[[phases]]``."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this model in this job."""
        yield from super().check(job)
        for key, sentence in self.fusion.config.check(job):
            yield ".".join(filter(None, ("fusion", key))), sentence
