from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.loss import IGNORED, LossSum
from forge_core.ops.auxiliary_loss import LEDGER
from forge_plugins_dense.huggingface import to_hf_state, weight_names
from forge_plugins_dense.multi_token_config import MultiTokenConfig, SequentialConfig

SEQUENTIAL = ComponentRef(
    kind="predictor",
    name="sequential",
    provider="forge-plugins-dense",
    factory="forge_plugins_dense.predictor:SequentialPredictor",
    config=SequentialConfig(),
)
EPS = 1e-5
LENGTHS = ([9, 2, 1, 12], [17, 7])
"""Of the documents of each row, some of them shorter than what is predicted."""


def multi_token(**keys):
    return MultiTokenConfig(predictor=SEQUENTIAL, **keys)


def cross_entropy(hidden, head, targets):
    total = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return LossSum(total, (targets != IGNORED).sum())


def batch_of(*, packed):
    """Two rows of 24 tokens; some targets are ignored, in packed rows that of each document's last token too."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(50, (2, 25), generator=generator)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:].clone()}
    batch["targets"][1, 4:6] = IGNORED
    if packed:
        batch["document"] = torch.stack(
            [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS]
        )
        batch["positions"] = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
        ends = F.pad(batch["document"][:, 1:] != batch["document"][:, :-1], (0, 1), value=True)
        batch["targets"][ends] = IGNORED
    return batch


def backward(model, batch):
    """As the engine does. Returns the task loss."""
    valid = int((batch["targets"] != IGNORED).sum())
    scale = torch.tensor(1 / valid)
    own = {name: torch.tensor(1 / count) for name, count in model.count_targets(batch).items()}
    LEDGER.start_step(scale, own_scales=own)
    total = model(**batch, loss=cross_entropy).total
    total.backward(scale)
    return total.detach() * scale


class Reference:
    """The formulas in float64: each document alone, and each depth only as long as there are tokens ahead."""

    def __init__(self, model):
        self.config = model.config
        self.weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}

    def losses(self, batch):
        """Of the next token and of each depth: the summed loss, and whether the guess at each target is right."""
        depths = self.config.multi_token.depths
        found = [[] for _ in range(1 + depths)]
        for row, tokens in enumerate(batch["tokens"]):
            document = batch["document"][row] if "document" in batch else torch.zeros_like(tokens)
            for one in document.unique():
                inside = document == one
                self._add(tokens[inside], batch["targets"][row][inside], found)
        return [(sum(total for total, _ in each), torch.cat([right for _, right in each])) for each in found]

    def _add(self, tokens, targets, found):
        w = self.weights
        embedded = w["embed.weight"][tokens]
        hidden = embedded
        for layer in range(self.config.n_layers):
            hidden = self._block(hidden, f"blocks.{layer}.")
        found[0].append(self._loss(hidden, "norm.weight", targets))
        for k in range(1, len(found)):
            if k >= len(tokens):
                break
            name = f"blocks.{self.config.n_layers + k - 1}."
            halves = self._norm(embedded[k:], f"{name}enorm.weight"), self._norm(hidden[:-1], f"{name}hnorm.weight")
            hidden = self._block(torch.cat(halves, dim=-1) @ w[f"{name}eh_proj.weight"].T, f"{name}block.")
            found[k].append(self._loss(hidden, f"{name}norm.weight", targets[k:]))

    def _loss(self, hidden, norm, targets):
        logits = self._norm(hidden, norm) @ self.weights["head.weight"].T
        valid = targets != IGNORED
        right = (logits.argmax(-1) == targets)[valid]
        return F.cross_entropy(logits[valid], targets[valid], reduction="sum"), right

    def _block(self, x, name):
        w, heads, groups = self.weights, self.config.n_heads, self.config.kv_heads
        read = self._norm(x, f"{name}attention_norm.weight")
        q, k, v = (
            (read @ w[f"{name}attention.{one}.weight"].T).unflatten(-1, (n, -1)).transpose(0, 1)
            for one, n in (("q", heads), ("k", groups), ("v", groups))
        )
        q, k = self._rotate(q), self._rotate(k)
        k, v = (one.repeat_interleave(heads // groups, dim=0) for one in (k, v))
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        unseen = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v
        x = x + mixed.transpose(0, 1).flatten(1) @ w[f"{name}attention.o.weight"].T
        read = self._norm(x, f"{name}feed_forward_norm.weight")
        gate, up, down = (w[f"{name}feed_forward.{one}.weight"] for one in ("gate", "up", "down"))
        return x + (F.silu(read @ gate.T) * (read @ up.T)) @ down.T

    def _norm(self, x, name):
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.weights[name]

    def _rotate(self, x):
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1]).double()[:, None] / self.config.rope_theta ** (torch.arange(half) / half)
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )


@pytest.mark.parametrize("normalizer", ["valid", "paper"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("depths", [1, 3])
def test_losses_and_gradients_are_those_of_the_formulas(tiny_model, normalizer, packed, depths):
    model = tiny_model(multi_token=multi_token(depths=depths, weight=0.7, normalizer=normalizer)).train()
    batch = batch_of(packed=packed)
    reference = Reference(model)
    (task, right), *further = reference.losses(batch)
    means = [total / len(right if normalizer == "paper" else its_right) for total, its_right in further]
    (task / len(right) + 0.7 / depths * sum(means)).backward()

    loss = backward(model, batch)

    torch.testing.assert_close(loss.double(), task.detach() / len(right), rtol=1e-6, atol=0)
    reported = LEDGER.means()
    assert sorted(reported) == [f"multi_token_{k}" for k in range(1, depths + 1)]
    for k, mean in enumerate(means, start=1):
        expected = 0.7 / depths * mean.detach()
        torch.testing.assert_close(reported[f"multi_token_{k}"].double(), expected, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        expected = reference.weights[name].grad
        assert (parameter.grad - expected).norm() < 1e-5 * expected.norm(), name


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_and_the_acceptance_of_each_depth_are_reported(tiny_model, packed):
    model = tiny_model(multi_token=multi_token(depths=2, acceptance_every=1), vocab_size=3).train()
    batch = batch_of(packed=packed)
    batch["tokens"] %= 3
    batch["targets"] = batch["targets"].remainder(3).where(batch["targets"] != IGNORED, IGNORED)
    _, *further = Reference(model).losses(batch)

    backward(model, batch)

    for k, (total, right) in enumerate(further):
        predictor = model.blocks[str(2 + k)]
        predictor.before_optimizer_step(predictor.accumulators(), 1.0)
        reported = predictor.step_metrics()
        torch.testing.assert_close(
            reported["multi_token_loss"].double(), total.detach() / len(right), rtol=1e-6, atol=0
        )
        assert 0 < right.sum() < len(right), "else it is no test"
        torch.testing.assert_close(reported["multi_token_acceptance"], right.float().mean())


def test_a_sample_of_positions_is_looked_at_for_acceptance(tiny_model):
    model = tiny_model(multi_token=multi_token(acceptance_every=5)).train()
    batch = batch_of(packed=False)

    backward(model, batch)

    seen = F.pad(batch["targets"][:, 1:], (0, 1), value=IGNORED)[:, ::5]
    assert model.blocks["2"].measured[3] == (seen != IGNORED).sum()


def test_each_layer_is_told_which_positions_have_a_token_ahead(tiny_model):
    model = tiny_model(multi_token=multi_token(depths=2)).train()
    told = {}
    for layer, k in (("2", 1), ("3", 2)):
        model.blocks[layer].block.feed_forward.register_forward_pre_hook(lambda _, args, k=k: told.update({k: args[1]}))

    backward(model, batch_of(packed=True))

    for k in (1, 2):
        rows = [torch.cat([torch.arange(length) < length - k for length in row]) for row in LENGTHS]
        assert torch.equal(told[k], torch.stack(rows))


def test_padding_is_not_ahead_of_anything(tiny_model):
    model = tiny_model(multi_token=multi_token()).train()
    batch = batch_of(packed=False)
    batch["positions"] = torch.arange(24).where(torch.arange(24) < 20, -1).expand(2, -1)
    batch["targets"][:, 19:] = IGNORED

    assert model.count_targets(batch) == {"multi_token_1": 18 + 16}


def test_evaluation_and_generation_are_those_of_the_model_without(tiny_model):
    plain, model = tiny_model().eval(), tiny_model(multi_token=multi_token(depths=2)).eval()
    batch = batch_of(packed=True)
    tokens = batch["tokens"]

    assert torch.equal(model(**batch, loss=cross_entropy).total, plain(**batch, loss=cross_entropy).total)
    assert torch.equal(model(tokens), plain(tokens))
    cache = model.make_cache(2, 24)
    model(tokens[:, :20], cache=cache)
    torch.testing.assert_close(model(tokens[:, 20:], cache=cache), plain(tokens)[:, 20:], rtol=1e-4, atol=1e-4)
    assert list(cache.layers) == ["0", "1"]
    model.train()
    assert torch.equal(model(tokens), plain(tokens)), "without a loss there is nothing to attach"


def test_stages_in_a_row_give_the_gradients_of_the_whole(tiny_model):
    whole = tiny_model(multi_token=multi_token(depths=2), n_layers=3).train()
    first, middle, last = (copy.deepcopy(whole) for _ in range(3))
    for part, keys in ((first, "0"), (middle, "1"), (last, "234")):
        for layer in "01234":
            if layer not in keys:
                del part.blocks[layer]
    first.norm = first.head = middle.embed = middle.norm = middle.head = last.embed = None
    batch = batch_of(packed=True)
    loss = backward(whole, batch)

    rest = {name: batch[name] for name in ("document", "positions", "targets")}
    sent, along = first(batch["tokens"], **rest, loss=cross_entropy)
    passed_on, further = middle(sent, **along, **rest, loss=cross_entropy)
    total = last(passed_on, **further, **rest, loss=cross_entropy).total
    scale = torch.tensor(1 / int((batch["targets"] != IGNORED).sum()))
    total.backward(scale)

    assert sent.shape == passed_on.shape == (2, 24, 32)
    declared = whole.travels({name: entry.shape for name, entry in batch.items()})
    assert {name: (one.shape, None) for name, one in along.items()} == declared
    assert further == along, "nothing on the way changes it"
    torch.testing.assert_close(total * scale, loss)
    parts = {name: p for part in (first, middle, last) for name, p in part.named_parameters()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(parts[name].grad, parameter.grad)
    assert LEDGER.means().keys() == {"multi_token_1", "multi_token_2"}


def test_layers_begin_with_the_values_that_they_have_without(tiny_model):
    plain, model = tiny_model(), tiny_model(multi_token=multi_token())

    weights = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(weights[name], parameter)


def test_flops_count_each_further_block_its_projection_and_the_head_again(tiny_model):
    plain, deeper = tiny_model(), tiny_model(n_layers=3)
    model = tiny_model(multi_token=multi_token())

    one_block = deeper.flops_per_token(64) - plain.flops_per_token(64)
    further = 6 * (2 * 32 * 32 + 50 * 32)
    assert model.flops_per_token(64) - plain.flops_per_token(64) == one_block + further


def test_more_depths_than_a_sequence_has_tokens_are_refused(tiny_config):
    job = SimpleNamespace(
        train=SimpleNamespace(seq_len=8),
        parallel=SimpleNamespace(tp=1, pp=1),
        run=SimpleNamespace(device="cpu"),
        data=SimpleNamespace(config=SimpleNamespace()),
        parametrization=None,
    )

    problems = dict(tiny_config(multi_token=multi_token(depths=8)).check(job))

    assert "no token is 8 ahead of another" in problems["multi_token.depths"]
    assert dict(tiny_config(multi_token=multi_token(depths=7)).check(job)) == {}


def test_the_form_of_hugging_face_has_the_model_without_predictors(tiny_model):
    model = tiny_model(multi_token=multi_token(depths=2))

    state = to_hf_state(dict(model.named_parameters()), model.config)

    assert state.keys() == set(weight_names(model.config).values())
    assert not any(".layers.2." in name or ".layers.3." in name for name in state)
