"""The conformance kits catch components that lie."""

from __future__ import annotations

import threading

import attrs
import numpy as np
import pytest
import torch
from torch import nn

from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.observation import Site
from forge_plugins_dense.block import Block
from forge_plugins_dense.initial_values import normal
from forge_plugins_vlm.connectors.linear import LinearConnector
from forge_plugins_vlm.connectors.linear_config import LinearConfig
from forge_plugins_vlm.contracts.fusion import FusionConfig
from forge_plugins_vlm.contracts.image_processor import Layout, Processed
from forge_plugins_vlm.encoders.conv_vit import ConvViT, EncoderLayer
from forge_plugins_vlm.encoders.conv_vit_config import ConvViTConfig
from forge_plugins_vlm.images.config import NaflexConfig, SquareConfig, TilesConfig
from forge_plugins_vlm.images.naflex import Naflex
from forge_plugins_vlm.images.square import Square
from forge_plugins_vlm.images.tiles import Tiles
from forge_plugins_vlm.testing.connector import ConnectorConformance
from forge_plugins_vlm.testing.fusion import FusionConformance
from forge_plugins_vlm.testing.image_processor import ImageProcessorConformance
from forge_plugins_vlm.testing.vision_encoder import VisionEncoderConformance
from forge_plugins_vlm.visibility import sees_images, visible_tokens


class HonestConnector(LinearConnector):
    """Keeps the contract; those below break one promise each."""


class DropsTheLast(HonestConnector):
    def forward(self, features, grid=None):
        return super().forward(features)[:, :-1]


class MixesTiles(HonestConnector):
    def forward(self, features, grid=None):
        return super().forward(features) + features.mean()


class LooksAtOneFeature(HonestConnector):
    def forward(self, features, grid=None):
        return super().forward(features[:, :1].expand_as(features))


class ForgetsItsBias(HonestConnector):
    def init_weights(self, rng, prefix):
        rng.fill(f"{prefix}layers.0.weight", self.layers[0].weight, lambda full, _: full.fill_(0.1))


class UsesAGeneratorOfItsOwn(HonestConnector):
    def init_weights(self, rng, prefix):
        for name, parameter in self.named_parameters():
            rng.fill(prefix + name, parameter, lambda full, _: full.normal_())


class HasAnIdleParameter(HonestConnector):
    def __init__(self, config, **keywords):
        super().__init__(config, **keywords)
        self.idle = nn.Parameter(torch.empty(1))

    def init_weights(self, rng, prefix):
        super().init_weights(rng, prefix)
        rng.fill(f"{prefix}idle", self.idle, lambda full, _: full.zero_())


class NamesNoBias(HonestConnector):
    def parameter_roles(self):
        return {"layers.0.weight": "matrix"}


class CountsItsCalls(HonestConnector):
    def forward(self, features, grid=None):
        with torch.no_grad():
            self.layers[0].bias += 1
        return super().forward(features)


class IsNotOnMeta(HonestConnector):
    def __init__(self, config, **keywords):
        super().__init__(config, **keywords)
        self.scale = nn.Parameter(torch.ones(1, device="cpu"))


@attrs.frozen(kw_only=True)
class TakesNothing(LinearConfig):
    def grid(self, features):
        raise ValueError("takes nothing at all")


@attrs.frozen(kw_only=True)
class CountsWrongly(LinearConfig):
    def num_tokens(self, features):
        return features[0] * features[1] - 1


def caught(kit, made, config, check, **given):
    """Run one check on a component that is not installed."""

    class Case(kit):
        def make(self, **keywords):
            return super().make(**keywords) if kit is FusionConformance else made(config, **keywords)

        def make_fusion(self, *, model, build):
            return BlocksOf(made, model, build)

        def use(self):
            return ComponentRef(kind=self.kind, name="liar", provider="tests", factory="", config=config)

    getattr(Case(), check)(**given)


@pytest.mark.parametrize(
    ("made", "config", "check", "sentence"),
    [
        (DropsTheLast, LinearConfig(), "test_gives_as_many_tokens_as_it_says", "becomes 16 tokens of width 16, and"),
        (HonestConnector, CountsWrongly(), "test_gives_as_many_tokens_as_it_says", "num_tokens is 15"),
        (HonestConnector, TakesNothing(), "test_takes_one_of_the_grids", "refuses each of 4 × 4"),
        (MixesTiles, LinearConfig(), "test_tiles_do_not_matter_to_each_other", "depend on the tiles beside it"),
        (LooksAtOneFeature, LinearConfig(), "test_gradients_reach_every_parameter", "no gradient reaches the features"),
        (HasAnIdleParameter, LinearConfig(), "test_gradients_reach_every_parameter", "no gradient reaches idle"),
        (ForgetsItsBias, LinearConfig(), "test_init_weights_fills_everything", "leaves connector.layers.0.bias"),
        (UsesAGeneratorOfItsOwn, LinearConfig(), "test_same_seed_same_weights", "must use the generator"),
        (NamesNoBias, LinearConfig(), "test_parameter_roles_cover_every_parameter", "leaves out layers.0.bias"),
        (CountsItsCalls, LinearConfig(), "test_forward_changes_nothing", "forward changed layers.0.bias"),
        (IsNotOnMeta, LinearConfig(), "test_init_weights_fills_everything", "scale: made on another device"),
        (HonestConnector, object(), "test_its_configuration_has_the_base", "does not extend ConnectorConfig"),
    ],
)
def test_a_connector_that_breaks_a_promise_is_caught(made, config, check, sentence):
    with pytest.raises(AssertionError, match=sentence):
        caught(ConnectorConformance, made, config, check)


class LeaksPadding(ConvViT):
    def forward(self, pixels, sizes=None):
        return super().forward(pixels)


class GivesTuples(ConvViT):
    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList([TupleLayer(config)])

    def forward(self, pixels, sizes=None):
        return self.layers[0](torch.zeros(2, 16, 64))[0]


class TupleLayer(EncoderLayer):
    def forward(self, hidden, visible=None):
        return (hidden,)


class HasItsOwnGrid(ConvViT):
    def __init__(self, config):
        super().__init__(ConvViTConfig())


class NamesNoSuchUnit(ConvViT):
    def units(self):
        return ["blocks.0"]


class NamesAnIdleUnit(ConvViT):
    def units(self):
        return ["layers"]


class SitesOfNoModule(ConvViT):
    def sites(self):
        return {"mixed": Site(module="mixer", dims=("tile", "patch", "width"))}


class SitesOfSamples(ConvViT):
    def sites(self):
        return {"normed": Site(module="norm", dims=("sample", "patch", "width"))}


class SitesThatNeverRun(ConvViT):
    def sites(self):
        return {"all": Site(module="layers", dims=("tile", "patch", "width"))}


class SitesThatDoNotAddUp(ConvViT):
    def sites(self):
        found = super().sites()
        return found | {"layers.0.mlp_out": found["layers.0.mlp_in"]}


class GivesFp32(ConvViT):
    def forward(self, pixels, sizes=None):
        return super().forward(pixels, sizes).float()


@attrs.frozen(kw_only=True)
class ClaimsAFinerGrid(ConvViTConfig):
    def grid(self, height, width):
        return height // 4, width // 4


@attrs.frozen(kw_only=True)
class TakesAll(ConvViTConfig):
    def grid(self, height, width):
        return height // self.patch, width // self.patch


@attrs.frozen(kw_only=True)
class SaysThatItTakesNoPadding(ConvViTConfig):
    @property
    def takes_padding(self):
        return False


@pytest.mark.parametrize(
    ("made", "config", "check", "given", "sentence"),
    [
        (HasItsOwnGrid, ClaimsAFinerGrid(), "test_gives_the_grid_that_it_says", {}, "says 8 × 8 features of width 64"),
        (ConvViT, TakesAll(), "test_refuses_tiles_that_it_cannot_take", {}, "DID NOT RAISE"),
        (LeaksPadding, ConvViTConfig(), "test_padding_does_not_leak", {}, "changes the features of its picture"),
        (ConvViT, SaysThatItTakesNoPadding(), "test_padding_does_not_leak", {}, "DID NOT RAISE"),
        (GivesFp32, ConvViTConfig(), "test_gives_the_dtype_of_its_weights", {"dtype": torch.bfloat16}, "the weights"),
        (
            GivesTuples,
            ConvViTConfig(n_layers=1),
            "test_units_are_layers_from_hidden_states_to_hidden_states",
            {},
            "must give hidden states, got tuple",
        ),
        (
            NamesNoSuchUnit,
            ConvViTConfig(),
            "test_units_are_layers_from_hidden_states_to_hidden_states",
            {},
            "'blocks.0', which is not a module",
        ),
        (
            NamesAnIdleUnit,
            ConvViTConfig(),
            "test_units_are_layers_from_hidden_states_to_hidden_states",
            {},
            "forward does not call the unit layers",
        ),
        (
            SitesOfNoModule,
            ConvViTConfig(),
            "test_every_site_has_its_dims_once_a_forward",
            {},
            "'mixer', which is no module",
        ),
        (SitesOfSamples, ConvViTConfig(), "test_every_site_has_its_dims_once_a_forward", {}, "must with 'tile'"),
        (SitesThatNeverRun, ConvViTConfig(), "test_every_site_has_its_dims_once_a_forward", {}, "computed 0 times"),
        (SitesThatDoNotAddUp, ConvViTConfig(), "test_sites_of_a_layer_add_up", {}, "do not add up to"),
    ],
)
def test_an_encoder_that_breaks_a_promise_is_caught(made, config, check, given, sentence):
    with pytest.raises((AssertionError, pytest.fail.Exception), match=sentence):
        caught(VisionEncoderConformance, lambda config: made(config), config, check, **given)


class BlocksOf:
    """A fusion of blocks of one class."""

    def __init__(self, made, model, build):
        self.made, self.model, self.build = made, model, build

    def block(self, layer):
        return self.made(self.model, layer, self.build)


@attrs.frozen(kw_only=True)
class BesideText(FusionConfig):
    places_tokens = False


class HonestFusion(Block):
    """Adds the mean of the image tokens that a position sees; those below break one promise each."""

    needs = frozenset({"image_tokens", "image_tile", "image_range"})

    def __init__(self, config, layer, build):
        super().__init__(config, layer, build)
        self.image = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, hidden, surroundings, cache=None):
        return super().forward(hidden + self.seen(surroundings.facts, cache), surroundings, cache)

    def seen(self, facts, cache):
        visible = self.visible(facts).to(self.image.weight.dtype)
        return visible @ self.image(facts["image_tokens"]) / visible.sum(-1, keepdim=True).clamp(min=1)

    def visible(self, facts):
        bounds = facts["image_range"]
        return visible_tokens(bounds, facts["image_tile"], latest=False) & sees_images(bounds)[..., None]

    def init_weights(self, rng, prefix, residual_std, std):
        super().init_weights(rng, prefix, residual_std, std)
        rng.fill(f"{prefix}image.weight", self.image.weight, normal(1.0))

    def parallel_plan(self):
        return {**super().parallel_plan(), "image": "whole"}

    def parameter_roles(self):
        return {**super().parameter_roles(), "image.weight": "matrix"}


class HasNoContextPlan(HonestFusion):
    context_plan = None


class NeedsColours(HonestFusion):
    needs = frozenset({"colour"})


class ReadsWhatItDoesNotNeed(HonestFusion):
    needs = frozenset({"image_tokens", "image_range"})


class SeesAllImages(HonestFusion):
    def visible(self, facts):
        return torch.ones(*facts["image_range"].shape[:2], len(facts["image_tile"]), dtype=torch.bool)


class SeesOtherDocuments(HonestFusion):
    def visible(self, facts):
        end = facts["image_range"][..., 2, None]
        return facts["image_tile"] < end


class SeesOtherRows(HonestFusion):
    def seen(self, facts, cache):
        return super().seen(facts, cache) + facts["image_tokens"].mean()


class SeesNothing(HonestFusion):
    def seen(self, facts, cache):
        return 0 * super().seen(facts, cache)


class SeesNothingLater(HonestFusion):
    def seen(self, facts, cache):
        return super().seen(facts, cache) * (cache is None or not cache.length)


class PlansTooLittle(HonestFusion):
    def parallel_plan(self):
        return Block.parallel_plan(self)


class NamesTooFewRoles(HonestFusion):
    def parameter_roles(self):
        return Block.parameter_roles(self)


class TrainsTooLittle(HonestFusion):
    def seen(self, facts, cache):
        return super().seen(facts, cache).detach()


@attrs.frozen(kw_only=True)
class WithAWord(BesideText):
    unsupported = {"cp": "no."}


@attrs.frozen(kw_only=True)
class WithAnotherAxis(BesideText):
    unsupported = {"dp": "images are never shared out over ranks"}


@attrs.frozen(kw_only=True)
class RefusesNothing(BesideText):
    unsupported = {"cp": "its blocks look at whole sequences"}

    def check(self, job):
        return iter(())


@attrs.frozen(kw_only=True)
class RefusesEverything(BesideText):
    def check(self, job):
        yield "", "not today"


class TestHonestFusion(FusionConformance):
    def use(self):
        return ComponentRef(kind=self.kind, name="honest", provider="tests", factory="", config=BesideText())

    def make_fusion(self, *, model, build):
        return BlocksOf(HonestFusion, model, build)


@pytest.mark.parametrize(
    ("made", "config", "check", "sentence"),
    [
        (HonestFusion, object(), "test_its_configuration_has_the_base", "does not extend FusionConfig"),
        (HonestFusion, WithAWord(), "test_reasons_are_sentences", "the reason for cp must be a sentence"),
        (HonestFusion, WithAnotherAxis(), "test_reasons_are_sentences", "names the axis 'dp'"),
        (HonestFusion, RefusesNothing(), "test_what_it_does_not_support_is_refused", "not refuse parallel.cp = 2"),
        (HonestFusion, RefusesEverything(), "test_what_it_does_not_support_is_refused", "refuses a job of one process"),
        (HasNoContextPlan, BesideText(), "test_blocks_have_what_the_contract_names", "layer 0 has no context_plan"),
        (NeedsColours, BesideText(), "test_needs_are_known", "layer 0 needs colour, and there are image_range, "),
        (ReadsWhatItDoesNotNeed, BesideText(), "test_blocks_read_what_they_need", "reads image_tile, which its needs"),
        (PlansTooLittle, BesideText(), "test_parallel_plan_covers_every_parameter", "has blocks.0.image.weight"),
        (NamesTooFewRoles, BesideText(), "test_parameter_roles_cover_every_parameter", "leaves out blocks.0.image.w"),
        (TrainsTooLittle, BesideText(), "test_gradients_reach_every_parameter", "no gradient reaches blocks.0.image"),
        (SeesAllImages, BesideText(), "test_text_alone_works", "pixels that no position sees change the logits"),
        (SeesAllImages, BesideText(), "test_an_image_changes_what_follows_and_nothing_before", "logits before it"),
        (SeesNothing, BesideText(), "test_an_image_changes_what_follows_and_nothing_before", "override open_gates"),
        (SeesOtherRows, BesideText(), "test_rows_do_not_see_each_other", "change the logits of another row"),
        (
            SeesOtherDocuments,
            BesideText(),
            "test_packed_documents_with_images_equal_those_by_themselves",
            "the document ItIIt has other logits where it is packed",
        ),
        (
            SeesNothingLater,
            BesideText(),
            "test_text_goes_on_after_images_from_the_cache",
            "text after images has other logits from a cache",
        ),
    ],
)
def test_a_fusion_that_breaks_a_promise_is_caught(made, config, check, sentence):
    with pytest.raises((AssertionError, pytest.fail.Exception), match=sentence):
        caught(FusionConformance, made, config, check)


class SaysOneTileMore(Square):
    def layout(self, size, grid):
        return Layout(2, super().layout(size, grid).slots)


class HasOtherSlots(Square):
    def __call__(self, image, grid):
        found = super().__call__(image, grid)
        return Processed(found.tiles, found.slots[::-1])


class BeginsAtOne(Square):
    def layout(self, size, grid):
        return Layout(1, super().layout(size, grid).slots + 1)


class GivesFloats(Square):
    def __call__(self, image, grid):
        found = super().__call__(image, grid)
        return Processed(found.tiles / 255, found.slots)


class IsBlind(Square):
    def __call__(self, image, grid):
        found = super().__call__(image, grid)
        return Processed(np.zeros_like(found.tiles), found.slots)


class TakesRGBAlone(Square):
    def __call__(self, image, grid):
        pixels = np.asarray(image.resize((16, 16))).transpose(2, 0, 1)
        return Processed(pixels[None], self.layout((1, 1), grid).slots)


class DrawsOnThePicture(Square):
    def __call__(self, image, grid):
        image.putpixel((0, 0), (1, 2, 3))
        return super().__call__(image, grid)


class KeepsItsLastPicture(Square):
    together = threading.Barrier(2)
    last = None

    def __call__(self, image, grid):
        self.last = super().__call__(image, grid)
        if threading.current_thread() is not threading.main_thread():
            self.together.wait(timeout=60)
        return self.last


class ForgetsSizes(Naflex):
    def __call__(self, image, grid):
        found = super().__call__(image, grid)
        return Processed(found.tiles, found.slots)


@attrs.frozen(kw_only=True)
class HasFewTiles(TilesConfig):
    most_tiles = 2


@attrs.frozen(kw_only=True)
class EndsNoRows(TilesConfig):
    has_newlines = False


@attrs.frozen(kw_only=True)
class EndsRows(SquareConfig):
    has_newlines = True


@attrs.frozen(kw_only=True)
class HasOneLayout(TilesConfig):
    depends_on_size = False


@attrs.frozen(kw_only=True)
class WantsLittle(TilesConfig):
    def at_least(self, size):
        return 1, 1


SMALL_SQUARE, SMALL_NAFLEX = SquareConfig(size=16), NaflexConfig(size=64, patch=4, max_patches=40)


@pytest.mark.parametrize(
    ("made", "config", "check", "given", "sentence"),
    [
        (Square, object(), "test_its_configuration_has_the_base", {}, "does not extend ImageProcessorConfig"),
        (SaysOneTileMore, SMALL_SQUARE, "test_a_layout_is_what_a_call_gives", {}, "says 2 tiles, and a call gives 1"),
        (HasOtherSlots, SMALL_SQUARE, "test_a_layout_is_what_a_call_gives", {}, "layout has other slots than a call"),
        (BeginsAtOne, SMALL_SQUARE, "test_slots_are_tokens_of_its_tiles", {}, "must be 0 to 3, of 1 tiles, or -2; got"),
        (GivesFloats, SMALL_SQUARE, "test_tiles_are_those_that_it_says", {}, "tiles must be uint8, got float64"),
        (Square, SquareConfig(size=8), "test_tiles_are_those_that_it_says", {"real": 16}, "tiles must be"),
        (Tiles, HasFewTiles(size=16), "test_tiles_are_those_that_it_says", {}, "and most_tiles is 2"),
        (Tiles, EndsNoRows(size=16), "test_slots_are_tokens_of_its_tiles", {}, "and has_newlines is false"),
        (Square, EndsRows(size=16), "test_slots_are_tokens_of_its_tiles", {}, "has_newlines is true, and no row"),
        (ForgetsSizes, SMALL_NAFLEX, "test_sizes_are_there_where_it_pads", {}, "pads is true, and it gives no sizes"),
        (
            Tiles,
            HasOneLayout(size=16),
            "test_pictures_of_all_sizes_have_one_layout_where_it_says_so",
            {},
            "depends_on_size is false, and a picture of",
        ),
        (
            Tiles,
            WantsLittle(size=16),
            "test_pictures_that_may_be_decoded_smaller_have_the_layout_of_the_whole",
            {},
            "at_least says 1 × 1 of pictures of .* and these have different layouts",
        ),
        (IsBlind, SMALL_SQUARE, "test_sees_the_picture", {}, "have the mean 0.0, and those of a white one 0.0"),
        (DrawsOnThePicture, SMALL_SQUARE, "test_leaves_the_picture_as_it_is", {}, "it changes the picture"),
        (KeepsItsLastPicture, SMALL_SQUARE, "test_threads_give_what_one_does", {}, "other tiles than one"),
    ],
)
def test_an_image_processor_that_breaks_a_promise_is_caught(made, config, check, given, sentence):
    real = attrs.evolve(config, size=given["real"]) if given else config

    with pytest.raises(AssertionError, match=sentence):
        caught(ImageProcessorConformance, lambda _: made(real), config, check)


def test_an_image_processor_for_rgb_alone_is_caught():
    with pytest.raises((AssertionError, ValueError)):
        caught(
            ImageProcessorConformance,
            TakesRGBAlone,
            SMALL_SQUARE,
            "test_takes_pictures_of_every_mode",
            mode="RGBA",
        )
