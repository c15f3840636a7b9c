"""Conformance of fusions (contract: ``forge_plugins_vlm.contracts.fusion``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, get_args

import attrs
import pytest
import torch
from torch import nn

from forge_core.config.sections import Job, ParallelSection, TrainSection
from forge_core.contracts.batch import Entry
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.loss import IGNORED
from forge_core.contracts.model import fits
from forge_core.contracts.observation import ObservableModule
from forge_plugins_vlm.config import VisionLanguageConfig
from forge_plugins_vlm.contracts.entries import ENTRIES
from forge_plugins_vlm.contracts.fusion import FACTS, Axis, FusionConfig
from forge_plugins_vlm.model import VisionLanguageModel
from forge_plugins_vlm.testing.small_images import SMALL, TOKENS_OF_TILE, row_entries, tiles
from forge_testing.component_case import builder
from forge_testing.model import ModelConformance

_METHODS = (
    *("init_weights", "parallel_plan", "context_plan", "recompute_plan", "parameter_roles"),
    *("active_parameters", "mixing_flops"),
)
_CLOSE = 1e-4


class FusionConformance(ModelConformance):
    """Subclass it, name the component, and pytest runs every check below, and those of models, on a small
    ``vision_language`` around it."""

    kind = "fusion"
    model_keys: ClassVar[Mapping[str, Any]] = {}
    """Further keys of the model, such as a feed-forward layer that the fusion needs."""
    entries: ClassVar[Mapping[str, Entry]] = {name: ENTRIES[name] for name in ("pixels", "image_slots", "image_range")}

    def make_fusion(self, *, model: VisionLanguageConfig, build: Callable[..., Any]) -> Any:
        """Build the fusion, as the model does for each layer. Override it for one that is not installed."""
        return build(self.use(), model=model)

    def open_gates(self, model: Any) -> None:
        """Change values of ``model`` that let nothing of an image through at first, such as those of a gate that begins
        closed. By default there are none."""

    def make(self, **given: Any) -> Any:
        """Build the model around the fusion."""
        return VisionLanguageModel(self.config_of_model(), build=_Around(self), **given)

    def config_of_model(self) -> VisionLanguageConfig:
        """That of the model around the fusion."""
        table = {"name": "forge-plugins-vlm:vision_language", **SMALL, **self.model_keys}
        config: VisionLanguageConfig = builder().resolve("model", table).config
        return attrs.evolve(config, fusion=self.use())

    def build_model(self, seed: int = 0) -> Any:
        """Same as ``ModelConformance.build_model``, with gates open."""
        model = super().build_model(seed)
        with torch.no_grad():
            self.open_gates(model)
        return model

    def batch(self) -> dict[str, torch.Tensor]:
        """Two rows with an image each, at different places."""
        found = self._rows(*(layout + "t" * (self.seq_len - self._length(layout)) for layout in ("tI", "tttI")))
        found["targets"] = found["tokens"].roll(-1, 1)
        found["targets"][:, -2:] = IGNORED
        return found

    # -- what it declares

    def test_its_configuration_has_the_base(self) -> None:
        config = self.use().config

        assert isinstance(config, FusionConfig), f"{type(config).__qualname__} does not extend FusionConfig"

    def test_reasons_are_sentences(self) -> None:
        for axis, reason in self.use().config.unsupported.items():
            assert axis in get_args(Axis), f"unsupported names the axis {axis!r}, which is none of {get_args(Axis)}"
            is_part = len(reason.split()) > 2 and not reason.endswith((".", ";")) and "\n" not in reason
            assert is_part, f"unsupported: the reason for {axis} must be a sentence without a full stop: {reason!r}"

    def test_what_it_does_not_support_is_refused(self) -> None:
        config = self.use().config
        assert not [*config.check(self._job())], f"check refuses a job of one process: {[*config.check(self._job())]}"
        for axis, reason in config.unsupported.items():
            said = [sentence for _, sentence in config.check(self._job(axis))]
            assert any(reason in one for one in said), f"check does not refuse parallel.{axis} = 2; call super().check"

    def test_blocks_have_what_the_contract_names(self) -> None:
        for name, block in self._on_meta().blocks.items():
            missing = [method for method in _METHODS if not callable(getattr(block, method, None))]
            assert not missing, f"the block of layer {name} has no {', '.join(missing)}"
            assert isinstance(block, ObservableModule), f"the block of layer {name} has no sites"
            assert isinstance(getattr(block, "attention", None), nn.Module), (
                f"the block of layer {name} has no module 'attention', which is asked for its cache"
            )

    def test_needs_are_known(self) -> None:
        for name, block in self._on_meta().blocks.items():
            unknown = sorted(set(block.needs) - FACTS)
            assert not unknown, (
                f"the block of layer {name} needs {', '.join(unknown)}, and there are {', '.join(sorted(FACTS))}"
            )

    def test_blocks_read_what_they_need(self) -> None:
        model = self.build_model().eval()
        read: dict[str, set[str]] = {name: set() for name in model.blocks}
        for name, block in model.blocks.items():
            block.register_forward_pre_hook(_watching(read[name]))

        with torch.no_grad():
            model(**self._rows("tItItt"))

        for name, block in model.blocks.items():
            undeclared = sorted(read[name] - set(block.needs))
            assert not undeclared, f"the block of layer {name} reads {', '.join(undeclared)}, which its needs leave out"

    def test_parallel_plan_covers_every_parameter(self) -> None:
        model = self._on_meta()
        plan = model.parallel_plan()
        left_out = [name for name, _ in model.named_parameters() if not any(_owners_in(name, plan))]

        assert not left_out, f"parallel_plan names no module that has {', '.join(left_out)}"

    # -- what it computes

    def test_text_alone_works(self) -> None:
        model = self.build_model().eval()
        rows = self._rows("tttttt", "tttttt")
        unseen = {**rows, "pixels": tiles(2, seed=5)}

        with torch.no_grad():
            alone = model(rows["tokens"])
            beside = model(**unseen)

        assert torch.isfinite(alone).all(), "the logits of text alone have values that are not finite"
        _assert_close(alone, beside, "pixels that no position sees change the logits of text")

    def test_an_image_changes_what_follows_and_nothing_before(self) -> None:
        model, given = self.build_model().eval(), self._rows("ttIttItt")
        start = self._length("ttItt")

        with torch.no_grad():
            before = model(**given)
            given["pixels"][:, 1] = tiles(1, seed=9)[:, 0]
            after = model(**given)

        early = (before - after)[:, :start].abs().max().item()
        assert early < _CLOSE, f"an image changes logits before it, by {early:.3g}"
        late = (before - after)[:, start:].abs().max().item()
        assert late > _CLOSE, (
            f"an image changes what follows by no more than {late:.3g}; if gates begin closed, override open_gates"
        )

    def test_rows_do_not_see_each_other(self) -> None:
        model, given = self.build_model().eval(), self._rows("tItttt", "ttIttt")

        with torch.no_grad():
            before = model(**given)
            given["pixels"][0] = tiles(1, seed=9)[0]
            given["tokens"][0] = (given["tokens"][0] + 1) % self.vocab_size
            after = model(**given)

        _assert_close(before[1], after[1], "the image and the text of a row change the logits of another row")

    def test_packed_documents_with_images_equal_those_by_themselves(self) -> None:
        model, layouts = self.build_model().eval(), ("tItt", "ItIIt", "tt")
        packed = self._rows("|".join(layouts))

        with torch.no_grad():
            whole = model(**packed)
            start = tile = 0
            for layout in layouts:
                alone, n_images = self._rows(layout), layout.count("I")
                length = self._length(layout)
                pixels = packed["pixels"][:, tile : tile + n_images] if n_images else alone["pixels"]
                given = {**alone, "tokens": packed["tokens"][:, start : start + length], "pixels": pixels}
                found = whole[:, start : start + length]
                _assert_close(found, model(**given), f"the document {layout} has other logits where it is packed")
                start, tile = start + length, tile + n_images

    def test_text_goes_on_after_images_from_the_cache(self) -> None:
        model, given = self.build_model().eval(), self._rows("tItttt")
        length = given["tokens"].shape[1]
        prompt = length - 3
        looked: list[int] = []
        model.vision.register_forward_hook(lambda *_: looked.append(1))

        with torch.no_grad():
            whole = model(**given)
            looked.clear()
            cache = model.make_cache(1, length)
            cut = {name: one if name == "pixels" else one[:, :prompt] for name, one in given.items()}
            parts = [model(**cut, cache=cache)]
            parts += [model(given["tokens"][:, place : place + 1], cache=cache) for place in range(prompt, length)]

        _assert_close(torch.cat(parts, dim=1), whole, "text after images has other logits from a cache")
        assert len(looked) == 1, f"images are looked at {len(looked)} times while text is generated"

    def _rows(self, *layouts: str) -> dict[str, torch.Tensor]:
        """A batch of layouts as ``row_entries`` takes them, of one length."""
        one = not self.use().config.places_tokens
        rows = [row_entries(layout, one_token_an_image=one) for layout in layouts]
        found = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        generator = torch.Generator().manual_seed(0)
        found["tokens"] = torch.randint(self.vocab_size, found["image_slots"].shape, generator=generator)
        found["pixels"] = tiles(len(rows), max(1, *(layout.count("I") for layout in layouts)))
        return found

    def _length(self, layout: str) -> int:
        """Positions of a layout."""
        more = TOKENS_OF_TILE - 1 if self.use().config.places_tokens else 0
        return len(layout) + more * layout.count("I")

    def _job(self, axis: Axis | None = None) -> Job:
        """A job of the model: of one process, or of two along an axis."""
        other = ComponentRef(kind="", name="", provider="", factory="", config=None)
        ranks: Any = {} if axis is None else {axis: 2}
        model = attrs.evolve(other, kind="model", name="vision_language", config=self.config_of_model())
        return Job(
            model=model,
            data=other,
            optimizer=other,
            scheduler=other,
            loss=other,
            train=TrainSection(steps=1, seq_len=self.seq_len),
            parallel=ParallelSection(**ranks),
        )


class _Around:
    """Builds a fusion as its case says, and everything else as a run does."""

    def __init__(self, case: FusionConformance) -> None:
        self._case = case
        self.resolve = builder().resolve

    def __call__(self, use: ComponentRef, /, **given: Any) -> Any:
        if use.kind == self._case.kind:
            return self._case.make_fusion(**given, build=builder())
        return builder()(use, **given)


class _Watched(dict[str, torch.Tensor]):
    """Facts that note which of them are read."""

    def __init__(self, facts: Mapping[str, torch.Tensor], read: set[str]) -> None:
        super().__init__(facts)
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        self._read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return super().get(name, default)


def _watching(read: set[str]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """A hook of a block, which notes in ``read`` what of the facts it reads."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        args[1].facts = _Watched(args[1].facts, read)

    return before


def _owners_in(name: str, plan: Mapping[str, object]) -> Iterator[bool]:
    """Whether the plan names a module that has this parameter, for each of them."""
    owners = name.split(".")[:-1]
    for depth in range(1, len(owners) + 1):
        yield any(fits(".".join(owners[:depth]), pattern) for pattern in plan)


def _assert_close(found: torch.Tensor, expected: torch.Tensor, sentence: str) -> None:
    difference = (found - expected).abs().max().item()
    if not difference < _CLOSE:
        pytest.fail(f"{sentence}, by {difference:.3g}")
