"""What can be set for fusions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import attrs
from attrs.validators import gt, optional

from forge_core.api import ComponentRef, Slot
from forge_plugins_vlm.contracts.fusion import FusionConfig

if TYPE_CHECKING:
    from forge_core.config.sections import Job
    from forge_plugins_vlm.config import VisionLanguageConfig


def _are_sections(_: object, attribute: attrs.Attribute[Any], value: tuple[int, int, int] | None) -> None:
    if value is not None and (min(value) < 0 or not sum(value)):
        raise ValueError(f"{attribute.name} must be three numbers of pairs of features, got {[*value]}")


@attrs.frozen(kw_only=True)
class JointDecoderConfig(FusionConfig):
    """Image tokens stand among those of text, and the decoder reads both alike."""

    bidirectional: bool = False
    """Let the tokens of an image see each other in both directions, as in PaliGemma; text sees what is before it."""

    mrope_sections: tuple[int, int, int] | None = attrs.field(default=None, validator=_are_sections)
    """Rotate so many pairs of features of a head by time, by row and by column of an image (M-RoPE, Qwen2-VL); in
    order, and all pairs in sum. Text after an image goes on behind its largest row or column."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this fusion in this job."""
        yield from super().check(job)
        model = job.model.config
        if self.mrope_sections is not None:
            yield from self._check_sections(job, self.mrope_sections)
        if not self.bidirectional:
            return
        if job.parallel.cp > 1:
            sentence = "a rank makes its own mask of the positions that it has, which is causal"
            yield "bidirectional", f"parallel.cp = {job.parallel.cp}: {sentence}; set parallel.cp = 1"
        if any(model.windows):
            yield "bidirectional", "a window is causal; remove model.window, or bidirectional"
        if model.attention not in ("auto", "efficient", "math"):
            sentence = f'the kernel "{model.attention}" takes no mask'
            yield "bidirectional", f'{sentence}; set model.attention to "auto", "efficient" or "math"'

    def _check_sections(self, job: Job, sections: tuple[int, int, int]) -> Iterator[tuple[str, str]]:
        model, said = job.model.config, f"{[*sections]} are {sum(sections)} pairs of features"
        for number in range(model.n_layers):
            if (pairs := model.rotary_size(model.layer(number)) // 2) != sum(sections):
                yield "mrope_sections", f"{said}, and layer {number} rotates {pairs} pairs a head"
                break
        if job.parallel.cp > 1:
            sentence = "a rank does not know how many images are before its positions"
            yield "mrope_sections", f"parallel.cp = {job.parallel.cp}: {sentence}; set parallel.cp = 1"
        if model.newline:
            yield "mrope_sections", "the learned end of a row has neither row nor column; set model.newline = false"


def _are_layers(_: object, attribute: attrs.Attribute[Any], value: tuple[int, ...] | None) -> None:
    if value is None:
        return
    if not value or len(set(value)) < len(value) or any(one < 0 for one in value):
        raise ValueError(f"{attribute.name} must be different numbers from 0, got {[*value]}")


@attrs.frozen(kw_only=True)
class CrossAttentionConfig(FusionConfig):
    """Text alone stands in the residual stream, and some layers look at image tokens."""

    places_tokens: ClassVar[bool] = False

    layers: tuple[int, ...] | None = attrs.field(default=None, validator=_are_layers)
    """The layers that look at images, from 0; by default every fourth, from layer 3, or the last one of less."""
    place: Literal["insert", "replace"] = "insert"
    """``insert``: before the layer, as in Flamingo. ``replace``: in place of its own attention, as in Llama 3.2."""
    attend: Literal["latest", "all_previous"] = "latest"
    """Which images text sees: the latest before it, with those right before that one, or all of its document."""
    norm_images: bool = True
    """Norm image tokens before keys and values are made of them. Llama 3.2 does not."""
    n_heads: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """Query heads of attention to images, of ``model.dim / n_heads`` features each; by default those of the decoder,
    also in their size."""
    n_kv_heads: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """Its key and value heads, each shared by ``n_heads / n_kv_heads`` query heads; by default as many as the decoder
    has."""

    gated: bool = True
    """Have learned gates, closed at first. Without them, output projections are 0 at first: the model begins as the
    decoder alone in either way."""
    gate_scale: float = attrs.field(default=1.0, validator=gt(0))
    """Gates are ``tanh(gate_scale · g)``, ``g`` being 0 at first: with 10, AdamW opens them ten times as fast."""

    def layers_of(self, n_layers: int) -> tuple[int, ...]:
        """The layers that look at images, of so many."""
        if self.layers is not None:
            return self.layers
        return tuple(range(3, n_layers, 4)) or (n_layers - 1,)

    def heads_of(self, model: VisionLanguageConfig) -> tuple[int, int, int]:
        """Query heads of attention to images, its key and value heads, and features a head."""
        size = model.head_size if self.n_heads is None else model.dim // self.n_heads
        return self.n_heads or model.n_heads, self.n_kv_heads or model.kv_heads, size

    def flops_of_images(self, layer: int, model: VisionLanguageConfig, image_tokens: int, positions: int) -> float:
        """Same as ``FusionConfig.flops_of_images``: keys and values of image tokens, and attention to them."""
        if layer not in self.layers_of(model.n_layers):
            return 0.0
        n_heads, kv_heads, size = self.heads_of(model)
        return image_tokens * (2 * 2.0 * model.dim * kv_heads * size + 4.0 * positions * n_heads * size)

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this fusion in this job."""
        yield from super().check(job)
        n_layers = job.model.config.n_layers
        beyond = [one for one in self.layers_of(n_layers) if one >= n_layers]
        if beyond:
            yield "layers", f"{beyond[0]} is none of the layers 0 to {n_layers - 1} of model.n_layers = {n_layers}"
        if self.gate_scale != 1 and not self.gated:
            yield "gate_scale", "has no effect without gates; remove it, or set gated = true"
        yield from self._check_heads(job.model.config, job.parallel.tp)

    def _check_heads(self, model: VisionLanguageConfig, tp: int) -> Iterator[tuple[str, str]]:
        n_heads, kv_heads, _ = self.heads_of(model)
        if self.n_heads is not None and model.dim % n_heads:
            sentence = f"{n_heads} heads cannot share out model.dim = {model.dim} evenly"
            yield "n_heads", f"{sentence}; {_nearest_divisor(model.dim, n_heads)} can"
        elif n_heads % kv_heads:
            sentence = f"{kv_heads} key-value heads cannot be shared out evenly to {n_heads} heads"
            yield "n_kv_heads", f"{sentence}; {_nearest_divisor(n_heads, kv_heads)} can"
        for key, own, number in (("n_heads", self.n_heads, n_heads), ("n_kv_heads", self.n_kv_heads, kv_heads)):
            if own is not None and number % tp:  # the decoder's own are checked there
                yield key, f"{number} heads cannot be shared out evenly to parallel.tp = {tp} ranks"


def _nearest_divisor(number: int, most: int) -> int:
    return max(one for one in range(1, min(most, number + 1, 4096)) if number % one == 0)


@attrs.frozen(kw_only=True)
class MixtureOfTransformersConfig(FusionConfig):
    """Image tokens stand among those of text, and each modality has weights of its own; attention is over both."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this fusion in this job."""
        yield from super().check(job)
        yield from _refuse_other_mixers(job, "each modality has projections of its own")


@attrs.frozen(kw_only=True)
class MoMaConfig(FusionConfig):
    """Attention is shared, and each modality has a feed-forward layer of its own: experts that choose tokens."""

    image: Annotated[ComponentRef, Slot("feed_forward", default="mlp")]
    """The feed-forward layer of image tokens; that of text is ``model.feed_forward``."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this fusion in this job."""
        yield from super().check(job)
        if hasattr(self.image.config, "contradictions_in"):
            for key, sentence in self.image.config.contradictions_in(job):
                yield f"image.{key}", sentence


def _refuse_other_mixers(job: Job, reason: str) -> Iterator[tuple[str, str]]:
    model = job.model.config
    if any(model.layer(number).mixer is not None for number in range(model.n_layers)):
        yield "", f"{reason}, which is there for the decoder's usual attention alone; remove mixer"
