"""The model kit passes a model that keeps the contract, and has a sentence for each way to break it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.batch import Entry
from forge_core.contracts.loss import LossSum
from forge_core.contracts.observation import Site
from forge_testing.model import ModelConformance
from forge_testing.small_model import SmallModel
from forge_testing.small_tower import ENTRIES, SmallTower


class CachedModel(SmallModel):
    """The small model, and a cache that keeps tokens and computes everything again."""

    def forward(self, tokens, targets=None, loss=None, document=None, cache=None, positions=None, **inputs):
        if cache is None:
            return super().forward(tokens, targets, loss, document)
        cache.append((tokens, torch.zeros_like(tokens) if positions is None else positions))
        tokens_so_far, positions_so_far = (torch.cat(parts, 1) for parts in zip(*cache, strict=True))
        hidden = super().forward(tokens_so_far, document=(positions_so_far < 0).long())
        return hidden[:, -tokens.shape[1] :]

    def make_cache(self, batch_size, max_len):
        return []


class TestCachedModel(ModelConformance):
    def make(self, **given):
        return CachedModel(**given)


STREAM = ("sample", "position", "width")


def doubled(block, hidden, visible):
    return 2 * hidden


def halved(block, value, hidden, visible):
    return block.forward(value / 2, visible)


class ObservableModel(SmallModel):
    """The small model, with sites."""

    def sites(self):
        here = f"{__name__}:"
        found = {f"blocks.{layer}.resid_post": Site(module=f"blocks.{layer}", dims=STREAM) for layer in self.blocks}
        computed = {"where": "input", "dims": STREAM, "compute": f"{here}doubled", "replace": f"{here}halved"}
        return found | {"doubled": Site(module="blocks.1", **computed)}


class TestObservableModel(ModelConformance):
    def make(self, **given):
        return ObservableModel(**given)


class TiedModel(CachedModel):
    def __init__(self, **given):
        super().__init__(**given)
        self.head.weight = self.embed.weight


class TestTiedModel(ModelConformance):
    def make(self, **given):
        return TiedModel(**given)


class OwnRoles(CachedModel):
    def parameter_roles(self):
        return {**super().parameter_roles(), "head.weight": "readout"}

    def parallel_plan(self):
        return {**super().parallel_plan(), "head": "by_group"}


def test_a_package_may_bring_roles():
    class Kit(ModelConformance):
        further_roles = ("readout", "by_group")

        def make(self, **given):
            return OwnRoles(**given)

    Kit().test_parameter_roles_cover_every_parameter()
    Kit().test_parallel_plan_names_modules()
    Kit.further_roles = ()
    with pytest.raises(AssertionError, match=r"head.weight has the unknown role 'readout'"):
        Kit().test_parameter_roles_cover_every_parameter()


class TestModelWithoutCache(ModelConformance):
    takes_documents = False

    def make(self, **given):
        return SmallModel(**given)


class PicturedModel(CachedModel):
    """Adds to each position how bright the sample's picture is, and a number of its own."""

    def forward(self, tokens, image, shade, targets=None, loss=None, **inputs):
        if self.embed is not None:
            table = self.embed.weight
            brightness = image.mean((1, 2, 3))[:, None] + shade
            self.embed.forward = lambda ids: F.embedding(ids, table) + brightness[..., None] * table.new_ones(1)
        return super().forward(tokens, targets, loss, **inputs)


class TestPicturedModel(ModelConformance):
    takes_documents = False
    entries = {
        "image": Entry(dims=("sample", "channel", "height", "width"), sizes=(None, 3, 4, 4), dtype="float32"),
        "shade": Entry(dims=("sample", "position"), dtype="int64"),
    }

    def make(self, **given):
        return PicturedModel(**given)

    def test_cache_gives_the_logits_of_the_whole(self):
        """This one computes everything again, and has forgotten what it was told of earlier positions."""

    test_left_padding_in_the_cache_is_not_seen = test_cache_gives_the_logits_of_the_whole


class TestSmallTower(ModelConformance):
    entries = ENTRIES

    def make(self, **given):
        return SmallTower(**given)


class GatedTower(SmallTower):
    """What it reads passes a gate that is closed at first."""

    def __init__(self, **given):
        super().__init__(**given)
        self.memory.gate = nn.Parameter(torch.empty(1))

    def forward(self, tokens, *args, features=None, memory=None, **inputs):
        if self.memory is not None:
            assert (features.shape[1] > 5) == (tokens == 7).any(), "rows are given more where a token says so"
            features = features * self.memory.gate.tanh()
        return super().forward(tokens, *args, features=features, memory=memory, **inputs)

    def init_weights(self, rng):
        super().init_weights(rng)
        if self.memory is not None:
            rng.fill("memory.gate", self.memory.gate, lambda full, _: full.zero_())


class TestBatchOfItsOwn(ModelConformance):
    entries = {"features": Entry(dims=("sample", "tile", "channel"), dtype="float32")}

    def make(self, **given):
        return GatedTower(**given)

    def batch(self):
        own = torch.arange(2 * 12).view(2, 12) % 5
        return {"tokens": own, "targets": own.roll(-1, 1), "features": torch.ones(2, 5, 6)}

    def gradients_need(self, model):
        with torch.no_grad():
            model.memory.gate.fill_(1)
        generator = torch.Generator().manual_seed(0)
        return {
            "tokens": torch.arange(2 * 12).view(2, 12),
            "targets": torch.arange(2 * 12).view(2, 12),
            "features": torch.randn(2, 8, 6, generator=generator),
        }


def test_an_entry_of_a_batch_that_nobody_describes_is_told():
    class Case(TestBatchOfItsOwn):
        entries = {}

    with pytest.raises(AssertionError, match="batch has 'features', of which entries says no dims"):
        Case().inputs()


def test_an_entry_without_sizes_is_told():
    class Case(TestPicturedModel):
        entries = {"image": Entry(dims=("sample", "height"))}

    with pytest.raises(
        AssertionError, match=r"'image' needs a size for each of its dims \('sample', 'height'\), got \(\)"
    ):
        Case().test_logits_have_the_right_shape()


def changed(**methods):
    return type("Faulty", (CachedModel,), methods)


def built(change):
    """The model after ``change(model)`` in its constructor."""

    class Faulty(CachedModel):
        def __init__(self, **given):
            super().__init__(**given)
            change(self)

    return Faulty


def observable(**sites):
    """The model with sites that are not as it declares them."""
    return type("Liar", (CachedModel,), {"sites": lambda self: sites})


class Disturbed(ObservableModel):
    """A hook on a block takes it off its fast path, which computes something else."""

    def forward(self, tokens, targets=None, loss=None, **inputs):
        result = super().forward(tokens, targets, loss, **inputs)
        return result * (1.5 if self.blocks["0"]._forward_hooks else 1)


class GoesPastItsHead(CachedModel):
    def sites(self):
        return {"logits": Site(module="head", dims=("sample", "position", "vocabulary"))}

    def forward(self, tokens, targets=None, loss=None, cache=None, **inputs):
        if cache is None:
            return super().forward(tokens, targets, loss, **inputs)
        head, self.head = self.head, None
        hidden = super().forward(tokens, cache=cache, **inputs)
        self.head = head
        return F.linear(hidden, head.weight)


def twice(block, value, hidden, visible):
    return block.forward(value, visible)


def returning(change):
    """The model whose result goes through ``change(model, result, tokens, inputs)``."""

    class Faulty(CachedModel):
        def forward(self, tokens, targets=None, loss=None, **inputs):
            return change(self, super().forward(tokens, targets, loss, **inputs), tokens, inputs)

    return Faulty


def declared(method, **extra):
    return changed(**{method: lambda self: getattr(CachedModel, method)(self) | extra})


class GlobalInit(CachedModel):
    def init_weights(self, rng):
        super().init_weights(rng)
        nn.init.normal_(self.head.weight)


class OrderedInit(CachedModel):
    def init_weights(self, rng):
        for number, (name, parameter) in enumerate(self.named_parameters()):
            rng.fill(name, parameter, lambda full, g, number=number: full.normal_(number, 0.1, generator=g))


class SilentInit(CachedModel):
    def init_weights(self, rng):
        rng.filled |= {name for name, _ in self.named_parameters()}


def seeing_ahead(model, result, tokens, inputs):
    return result + result.mean(1, keepdim=True) if isinstance(result, torch.Tensor) else result


class LossOfRawHidden(CachedModel):
    def forward(self, tokens, targets=None, loss=None, **inputs):
        if loss is None:
            return super().forward(tokens, **inputs)
        return loss(self.embed(tokens), self.head, targets)


class MeanLoss(CachedModel):
    def forward(self, tokens, targets=None, loss=None, **inputs):
        result = super().forward(tokens, targets, loss, **inputs)
        return result.total / result.count if isinstance(result, LossSum) else result


class BlindToDocuments(CachedModel):
    def forward(self, tokens, targets=None, loss=None, document=None, **inputs):
        return super().forward(tokens, targets, loss, **inputs)


class BlindToPadding(CachedModel):
    def forward(self, tokens, targets=None, loss=None, positions=None, **inputs):
        return super().forward(tokens, targets, loss, **inputs)


class ForgetfulCache(CachedModel):
    def forward(self, tokens, targets=None, loss=None, cache=None, **inputs):
        return super().forward(tokens, targets, loss, cache=None if cache is None else [], **inputs)


class NormInEveryStage(CachedModel):
    def forward(self, tokens, targets=None, loss=None, **inputs):
        if self.embed is None:
            tokens = F.rms_norm(tokens, (self.dim,))
        return super().forward(tokens, targets, loss, **inputs)


class Float32Head(CachedModel):
    def forward(self, tokens, targets=None, loss=None, **inputs):
        result = super().forward(tokens, targets, loss, **inputs)
        return result.float() if isinstance(result, torch.Tensor) else result


def counting(model):
    model.register_buffer("steps", torch.zeros(()))


class Counting(CachedModel):
    def __init__(self, **given):
        super().__init__(**given)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, tokens, targets=None, loss=None, **inputs):
        self.steps += 1
        return super().forward(tokens, targets, loss, **inputs)

    def init_weights(self, rng):
        super().init_weights(rng)
        rng.fill("steps", self.steps, lambda full, _: full.zero_())


class FrozenEmbedding(CachedModel):
    """Everything before the norm is detached, so that only norm and head learn."""

    def forward(self, tokens, targets=None, loss=None, **inputs):
        head, self.head = self.head, None
        hidden = super().forward(tokens, **inputs).detach()
        self.head = head
        return head(hidden) if loss is None else loss(hidden * 0.01, head, targets)


FAULTS = [
    (
        built(lambda m: setattr(m, "norm", None)),
        "test_declares_its_parts",
        "the whole model must have the module 'norm'",
    ),
    (
        built(lambda m: setattr(m, "blocks", nn.ModuleList(m.blocks.values()))),
        "test_declares_its_parts",
        "nn.ModuleDict",
    ),
    (
        built(lambda m: setattr(m, "blocks", nn.ModuleDict({f"layer{k}": b for k, b in m.blocks.items()}))),
        "test_declares_its_parts",
        "keys of blocks must be the global layer indices 0, 1, …, got .'layer0'",
    ),
    (
        built(lambda m: setattr(m, "extra", nn.Linear(2, 2))),
        "test_declares_its_parts",
        "extra.weight, extra.bias: parameters outside of embed, blocks, norm, head and the parts in stage_of",
    ),
    (
        changed(stage_of=lambda self: {"memory": "first"}),
        "test_declares_its_parts",
        "stage_of: the model has no module 'memory'",
    ),
    (
        changed(units=lambda self: ["memory.layers.0"]),
        "test_units_are_called_with_hidden_states",
        "units names 'memory.layers.0', which is no module",
    ),
    (
        changed(units=lambda self: ["blocks.0.up"]),
        "test_units_are_called_with_hidden_states",
        "the unit blocks.0.up is in blocks",
    ),
    (
        changed(units=lambda self: ["embed"]),
        "test_units_are_called_with_hidden_states",
        "the unit embed must be called with hidden states",
    ),
    (
        changed(travels=lambda self, shapes: {"memory": (shapes["tokens"], None)}),
        "test_stages_chained_equal_the_whole",
        "must return hidden states and what travels, got Tensor",
    ),
    (built(lambda m: setattr(m, "vocab_size", 5)), "test_states_its_sizes", "vocab_size must be 61, got 5"),
    (built(lambda m: setattr(m, "max_seq_len", 4)), "test_states_its_sizes", "max_seq_len is 4"),
    (
        changed(parameter_roles=lambda self: {"embed.weight": "embedding"}),
        "test_parameter_roles_cover_every_parameter",
        "parameter_roles leaves out blocks.0.attention_norm.weight",
    ),
    (declared("parameter_roles", gate="matrix"), "test_parameter_roles_cover_every_parameter", "names gate"),
    (declared("parallel_plan", **{"blocks.*.gate": "row"}), "test_parallel_plan_names_modules", "matches no module"),
    (declared("parallel_plan", embed="rows"), "test_parallel_plan_names_modules", "'embed' the unknown role 'rows'"),
    (declared("recompute_plan", mm="keep"), "test_recompute_plan_names_operations", "'mm', which torch does not have"),
    (
        declared("recompute_plan", **{"aten.mm": "save"}),
        "test_recompute_plan_names_operations",
        "recompute_plan says 'save' for 'aten.mm'",
    ),
    (
        changed(flops_per_token=lambda self, seq_len: 2.0),
        "test_flops_per_token_is_plausible",
        "less than the head alone",
    ),
    (
        changed(flops_per_token=lambda self, seq_len: 1e9 - seq_len),
        "test_flops_per_token_is_plausible",
        "flops_per_token falls with the sequence's length",
    ),
    (built(counting), "test_init_weights_fills_everything", "init_weights leaves steps uninitialised"),
    (SilentInit, "test_init_weights_fills_everything", "leaves values that are not finite in embed.weight"),
    (GlobalInit, "test_same_seed_same_weights", "head.weight differs between two models of one seed"),
    (OrderedInit, "test_a_stage_has_the_weights_of_the_whole", "differs when the model holds only its last block"),
    (
        returning(lambda m, r, t, i: r[..., :-1]),
        "test_logits_have_the_right_shape",
        r"must be \(B, S, V\) = \(2, 12, 61\)",
    ),
    (returning(seeing_ahead), "test_is_causal", "the model sees the future"),
    (returning(lambda m, r, t, i: r * 0), "test_is_causal", "does not change the logits there"),
    (LossOfRawHidden, "test_loss_is_applied_to_its_hidden_states", "the loss must see the normed hidden states"),
    (MeanLoss, "test_loss_is_applied_to_its_hidden_states", "must return its LossSum, got Tensor"),
    (BlindToDocuments, "test_documents_do_not_see_each_other", "two documents packed into one sequence"),
    (NormInEveryStage, "test_stages_chained_equal_the_whole", "two stages in a row give other logits"),
    (Float32Head, "test_works_in_bf16", "with bf16 weights the logits are torch.float32"),
    (ForgetfulCache, "test_cache_gives_the_logits_of_the_whole", "in chunks through a cache changes the logits"),
    (BlindToPadding, "test_left_padding_in_the_cache_is_not_seen", "padding on the left"),
    (FrozenEmbedding, "test_gradients_reach_every_parameter", "no gradient reaches embed.weight"),
    (Counting, "test_forward_changes_only_accumulators", "forward changed steps"),
    (FrozenEmbedding, "test_loss_falls_in_twenty_steps", "hardly anything is learned"),
    (
        observable(resid=Site(module="blocks.9", dims=STREAM)),
        "test_every_site_has_its_dims_once_a_forward",
        "the site resid is at 'blocks.9', which is no module",
    ),
    (
        observable(resid=Site(module="blocks.0", dims=("sample", "width", "position"))),
        "test_every_site_has_its_dims_once_a_forward",
        "resid has 16 along its dim 'position', and there are 12",
    ),
    (
        observable(resid=Site(module="blocks.0", dims=STREAM[1:])),
        "test_every_site_has_its_dims_once_a_forward",
        r"has the shape \(2, 12, 16\), and declares 2 dims",
    ),
    (
        observable(blocks=Site(module="blocks", dims=STREAM)),
        "test_every_site_has_its_dims_once_a_forward",
        "blocks is computed 0 times in a forward",
    ),
    (
        observable(hidden=Site(module="blocks.0", where="input", argument=2, dims=STREAM)),
        "test_every_site_has_its_dims_once_a_forward",
        "hidden is input 2 of blocks.0, which has 2",
    ),
    (Disturbed, "test_looking_at_sites_changes_nothing", "the logits are others while sites are looked at"),
    (
        observable(
            twice=Site(
                module="blocks.1",
                where="input",
                dims=STREAM,
                compute=f"{__name__}:doubled",
                replace=f"{__name__}:twice",
            )
        ),
        "test_a_site_put_back_gives_what_its_module_gave",
        "the site twice: replace, of the value that compute gives, changes what blocks.1 gives",
    ),
    (GoesPastItsHead, "test_sites_are_there_with_a_cache", "do not compute logits twice"),
]


@pytest.mark.parametrize(("model", "check", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(model, check, sentence):
    class Case(ModelConformance):
        def make(self, **given):
            return model(**given)

    with pytest.raises(AssertionError, match=sentence):
        getattr(Case(), check)()


def test_every_check_has_a_fault_that_it_finds():
    checks = {name for name in dir(ModelConformance) if name.startswith("test_")}

    assert {check for _, check, _ in FAULTS} == checks
