"""The keys of images among text that are read as streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import attrs
from attrs.validators import ge, le

from forge_core.config.sections import Job
from forge_plugins_data.hub_config import check_streams
from forge_plugins_vlm.data.config import ImageTextConfig


def _of_a_data_set(config: ImageTextStreamingConfig, _: attrs.Attribute[Any], __: int) -> None:
    if config.path is not None:
        raise ValueError(
            f"are parts of a data set, and path = {config.path!r} is there: name dataset in its place, or use the "
            "source image_text"
        )
    if config.validation:
        raise ValueError(f"hold nothing out, and validation = {config.validation} is there; remove it")
    if config.max_rows is not None:
        raise ValueError(f"have no last row, and max_rows = {config.max_rows} is there; remove it, or use image_text")


@attrs.frozen(kw_only=True)
class ImageTextStreamingConfig(ImageTextConfig):
    """Images among text of a data set of the ``datasets`` library, read and tokenised while the run goes on. The keys
    are those of ``image_text``, with ``dataset`` in place of ``path``.

    It has ``streams``, each a part of the data set, which are dealt to the data-parallel ranks; the state of each is
    saved with the checkpoint. It holds nothing out. Needs the extra ``datasets``.
    """

    has_own_order: ClassVar[bool] = True
    streams: int = attrs.field(default=8, validator=[ge(1), le(2**16), _of_a_data_set])
    """Parts of the data set: so many data-parallel ranks at most, and a divisor of ``train.global_batch_size``. Best is
    a divisor of the number of files. It cannot change when a run goes on."""
    shuffle_buffer: int = attrs.field(default=200, validator=[ge(1), le(2**20)])
    """Conversations of a stream that are put into a pseudo-random order together, another one in each epoch, by the
    run's seed, and packed together. Their images are held in memory as they are in files. 1 keeps their order."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """What ``check_streams`` finds."""
        yield from check_streams(self, self.streams, job)
