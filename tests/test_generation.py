from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import ConfigError, NonFiniteError
from forge_core.registry.discovery import discover
from forge_core.train.initialisation import initialise
from forge_plugins_dense.config import MLPConfig, TransformerConfig
from forge_plugins_dense.transformer import Transformer
from forge_plugins_inference.generation import generate, generate_steps, sample

PROMPTS = [[3, 14, 15, 9, 2, 6], [5], [35, 8, 9]]


@pytest.fixture
def model():
    feed_forward = ComponentRef(
        kind="feed_forward",
        name="mlp",
        provider="forge-plugins-dense",
        factory="forge_plugins_dense.feed_forward:MLP",
        config=MLPConfig(hidden_dim=48),
    )
    config = TransformerConfig(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=64, init_std=0.3, feed_forward=feed_forward
    )
    model = Transformer(config, vocab_size=40, build=ComponentBuilder(discover()))
    initialise(model, seed=0)
    return model


@torch.no_grad()
def greedy(model, prompt, n):
    """Without a cache: the whole sequence again for each token."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
    return tokens[len(prompt) :]


def test_likeliest_tokens_are_those_of_whole_forwards_for_prompts_of_any_length(model):
    assert generate(model, PROMPTS, max_new_tokens=8, temperature=0) == [greedy(model, p, 8) for p in PROMPTS]
    assert generate(model, PROMPTS[:1], max_new_tokens=8, temperature=0) == [greedy(model, PROMPTS[0], 8)]


def test_no_new_tokens_are_none(model):
    assert generate(model, PROMPTS, max_new_tokens=0) == [[] for _ in PROMPTS]
    assert model.training


def test_long_prompts_are_read_in_chunks(model, monkeypatch):
    whole = generate(model, PROMPTS, max_new_tokens=5, temperature=0)
    for chunk in (1, 2, 4):
        monkeypatch.setattr("forge_plugins_inference.generation.PREFILL_CHUNK", chunk)
        assert generate(model, PROMPTS, max_new_tokens=5, temperature=0) == whole


def test_a_row_that_stopped_produces_nothing_further_and_the_others_go_on(model):
    free = generate(model, PROMPTS, max_new_tokens=8, temperature=0)
    stop = free[0][3]

    stopped = generate(model, PROMPTS, max_new_tokens=8, temperature=0, stop=stop)

    assert stopped == [row[: row.index(stop)] if stop in row else row for row in free]
    assert len(stopped[0]) < 8


def test_generation_ends_when_all_rows_have(model):
    first = generate(model, [[3]], max_new_tokens=1, temperature=0)[0][0]
    steps = list(generate_steps(model, [[3], [3]], max_new_tokens=20, temperature=0, stop=first))
    assert [step.tolist() for step in steps] == [[-1, -1]]


def test_tokens_arrive_one_step_at_a_time(model):
    steps = generate_steps(model, PROMPTS, max_new_tokens=6, temperature=0)
    assert torch.stack(list(steps), dim=1).tolist() == generate(model, PROMPTS, max_new_tokens=6, temperature=0)


def test_the_model_is_left_as_it_was(model):
    model.train()
    generate(model, PROMPTS, max_new_tokens=2)
    assert model.training

    steps = generate_steps(model, PROMPTS, max_new_tokens=9)
    next(steps)
    assert not model.training
    assert torch.is_grad_enabled()
    steps.close()
    assert model.training


def test_the_same_generator_gives_the_same_samples(model):
    def draw(seed):
        return generate(model, PROMPTS, max_new_tokens=10, generator=torch.Generator().manual_seed(seed))

    assert draw(1) == draw(1) != draw(2)


LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))


def frequencies(**settings):
    drawn = sample(LOGITS.expand(40_000, 4), generator=torch.Generator().manual_seed(0), **settings)
    return drawn.bincount(minlength=4) / 40_000


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"temperature": 1e-300}, [1, 0, 0, 0]),
        ({"temperature": 5e-324, "top_p": 0.9}, [1, 0, 0, 0]),
    ],
)
def test_samples_follow_the_distribution_that_was_asked_for(settings, expected):
    torch.testing.assert_close(frequencies(**settings), torch.tensor(expected).float(), atol=0.01, rtol=0)


@pytest.mark.parametrize("top_k", [1, 3])
def test_no_more_tokens_are_sampled_from_than_asked_for_where_several_are_equally_likely(top_k):
    drawn = sample(torch.zeros(1000, 8), top_k=top_k, generator=torch.Generator().manual_seed(0))
    assert len(set(drawn.tolist())) == top_k


class Float64Refused(TorchDispatchMode):
    """Every tensor may be on MPS, which has no float64."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        assert not (isinstance(found, torch.Tensor) and found.dtype == torch.float64), function
        return found


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"temperature": 5e-324}])
def test_on_mps_no_float64_is_needed(settings):
    with FakeTensorMode(), Float64Refused():
        drawn = sample(torch.zeros(2, 30, device="mps"), **settings)
    assert drawn.shape == (2,)


def test_top_p_does_not_depend_on_the_order_of_the_vocabulary():
    logits = LOGITS[torch.tensor([3, 0, 2, 1])].expand(1000, 4)
    drawn = sample(logits, top_p=0.65, generator=torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {1, 3}


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ([[]], {}, "a prompt is empty"),
        ([], {}, "a prompt is empty"),
        ([[1, 40]], {}, "token id 40; the model's vocabulary ends at 39"),
        ([[1, -2]], {}, "token id -2"),
        ([[1] * 60, [2]], {"max_new_tokens": 5}, "60 tokens and 5 new ones .* 64 tokens; .* may be 4 at most"),
        ([[1] * 64], {}, "64 tokens; shorten the prompt"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens must be 0 .* or more, got -1"),
        ([[1]], {"temperature": -1.0}, "temperature"),
        ([[1]], {"temperature": float("nan")}, "temperature"),
        ([[1]], {"top_k": -1}, "top_k"),
        ([[1]], {"top_p": 0.0}, "top_p"),
    ],
)
def test_what_cannot_be_done_is_told_before_anything_is_computed(model, prompts, settings, words):
    with pytest.raises(ConfigError, match=words):
        generate_steps(model, prompts, **({"max_new_tokens": 3} | settings))


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_without_finite_logits_is_told_and_not_sampled_from(model, temperature, value):
    next(model.parameters()).data[5] = value

    assert len(generate(model, [[1, 2]], max_new_tokens=0)) == 1
    with pytest.raises(NonFiniteError, match="logits are not finite in float32, and no token can be sampled"):
        generate(model, [[1, 2], [3, 5]], max_new_tokens=2, temperature=temperature)


def test_a_row_ends_where_its_tokens_are_all_that_is_wanted(model):
    alone = generate(model, PROMPTS, max_new_tokens=6, temperature=0)

    ended = generate(model, PROMPTS, max_new_tokens=6, temperature=0, has_ended=lambda new: len(new) == 2)

    assert ended == [row[:2] for row in alone]
    assert model.training
