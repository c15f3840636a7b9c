"""LongRoPE: factors for each pair of features, others beyond the original context."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_core.errors import ConfigError
from forge_plugins_dense.rope import rotary_tables
from forge_plugins_dense.rope_config import LongRope
from forge_plugins_dense.sequence_lengths import lengths_of
from forge_plugins_dense.weight_layouts import Phi3Layout

ROPE = LongRope(short_factor=(1.0, 1.3, 2.0), long_factor=(1.5, 4.0, 9.0), original_max_seq_len=12)
PARTIAL = {"rotary_fraction": 0.75, "rope_theta": 500.0}
PHI = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 12,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SCALING = {"type": "longrope", "short_factor": [1.0, 1.3, 2.0], "long_factor": [1.5, 4.0, 9.0]}
PUBLISHED = {
    **PHI,
    "architectures": ["Phi3ForCausalLM"],
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.75,
    "rope_scaling": SCALING,
}


@pytest.fixture
def pair(tiny_model):
    """Their model and ours, with its weights."""
    torch.manual_seed(0)
    rope = SCALING | {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
    config = transformers.Phi3Config(**PHI, rope_parameters=rope)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ours = tiny_model(long_rope=ROPE, **PARTIAL)
    state = theirs.state_dict()
    recipes = Phi3Layout(None).to_forge(ours.config, state)
    ours.load_state_dict({name: one.make(*(state[read] for read in one.reads)) for name, one in recipes.items()})
    return theirs, ours.eval()


@pytest.mark.parametrize(("length", "factors"), [(12, ROPE.short_factor), (13, ROPE.long_factor)])
def test_tables_are_those_of_the_formula(length, factors):
    positions = torch.arange(length)[None]
    scaling = attrs.evolve(ROPE, attention_factor=1.25)

    cos, sin = rotary_tables(positions, 6, 500.0, scaling, lengths=length)

    frequencies = 500.0 ** -(torch.arange(3).double() / 3) / torch.tensor(factors, dtype=torch.float64)
    angles = positions.double()[:, :, None, None] * frequencies
    torch.testing.assert_close(cos.double(), 1.25 * angles.cos(), atol=1e-6, rtol=0)
    torch.testing.assert_close(sin.double(), 1.25 * angles.sin(), atol=1e-6, rtol=0)
    each = rotary_tables(positions, 6, 500.0, scaling, lengths=torch.full((1, length), length))
    assert torch.equal(each[0], cos)
    assert torch.equal(each[1], sin)


def test_a_plan_leaves_no_shapes_behind_in_place_of_factors():
    scaling = attrs.evolve(ROPE, long_factor=(1.7, 4.3, 9.1))  # that no other test has
    with FakeTensorMode():
        rotary_tables(torch.arange(20)[None], 6, 500.0, scaling, lengths=20)

    cos, _ = rotary_tables(torch.arange(20)[None], 6, 500.0, scaling, lengths=20)

    assert cos[0, 1, 0, 0].item() == pytest.approx(math.cos(1 / 1.7))


def test_lengths_are_those_of_documents_and_do_not_count_padding():
    document = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [-1, -1, 0, 1, 2, 3]])

    assert lengths_of(document, None).tolist() == [[2, 2, 3, 3, 3, 1], [6] * 6]
    assert lengths_of(document, positions).tolist() == [[2, 2, 3, 3, 3, 1], [4] * 6]
    assert lengths_of(None, positions).tolist() == [[6] * 6, [4] * 6]


def test_the_attention_factor_follows_the_stretch_unless_it_is_given(tiny_config):
    config = tiny_config(long_rope=ROPE, **PARTIAL)
    assert config.frequency_scaling.attention_factor == math.sqrt(1 + math.log(64 / 12) / math.log(12))
    assert tiny_config(long_rope=ROPE, max_seq_len=8, **PARTIAL).frequency_scaling.attention_factor == 1.0
    given = attrs.evolve(ROPE, attention_factor=1.5)
    assert tiny_config(long_rope=given, **PARTIAL).frequency_scaling.attention_factor == 1.5


@pytest.mark.parametrize("length", [11, 12, 13, 40])
@torch.no_grad()
def test_logits_are_theirs_on_both_sides_of_the_original_context(pair, length):
    theirs, ours = pair
    tokens = torch.randint(50, (2, length), generator=torch.Generator().manual_seed(1))

    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [5, 12, 20])
@torch.no_grad()
def test_generation_across_the_original_context_gives_their_tokens(pair, tokens, length):
    """Keys in a cache were turned by short factors; from the thirteenth token on, all have to be by long ones."""
    theirs, ours = pair
    prompt = tokens[:, :length]
    expected = theirs.generate(prompt, max_new_tokens=24, do_sample=False, use_cache=True)
    assert torch.equal(expected, theirs.generate(prompt, max_new_tokens=24, do_sample=False, use_cache=False))

    cache = ours.make_cache(2, 60)
    found, logits = prompt, ours(prompt, cache=cache)
    for _ in range(24):
        found = torch.cat((found, logits[:, -1:].argmax(-1)), dim=1)
        logits = ours(found[:, -1:], cache=cache)
        assert logits.shape == (2, 1, 50)
        torch.testing.assert_close(logits, ours(found)[:, -1:], atol=1e-5, rtol=1e-5)

    assert torch.equal(found, expected)


@torch.no_grad()
def test_padded_rows_are_each_as_alone_when_one_outgrows_the_original_context_before_the_other(pair, tokens):
    _, ours = pair
    lengths = (11, 4)
    positions = torch.stack([(torch.arange(11) - 11 + length).clamp(min=-1) for length in lengths])
    cache = ours.make_cache(2, 40)

    ours(tokens[:, :5], positions=positions[:, :5], cache=cache)  # the second row has no token in the first chunk
    logits = ours(tokens[:, 5:11], positions=positions[:, 5:], cache=cache)
    for step in range(12):
        for row, length in enumerate(lengths):
            alone = ours(tokens[row : row + 1, 11 - length : 11 + step])
            torch.testing.assert_close(logits[row, -1], alone[0, -1], atol=1e-5, rtol=1e-5)
        at = torch.tensor([[length + step] for length in lengths])
        logits = ours(tokens[:, 11 + step : 12 + step], positions=at, cache=cache)


@torch.no_grad()
def test_packed_and_padded_sequences_on_both_sides_are_each_as_alone(pair, tokens):
    _, ours = pair
    document = torch.tensor([[0] * 9 + [1] * 15]).expand(2, -1)
    positions = torch.cat((torch.arange(9), torch.arange(15))).expand(2, -1)

    packed = ours(tokens, document=document, positions=positions)

    torch.testing.assert_close(packed[:, :9], ours(tokens[:, :9]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed[:, 9:], ours(tokens[:, 9:]), atol=1e-5, rtol=1e-5)
    padded = ours(tokens, positions=torch.where(torch.arange(24) < 9, torch.arange(24), -1).expand(2, -1))
    torch.testing.assert_close(padded[:, :9], ours(tokens[:, :9]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"long_rope": ROPE}, "has 3 factors, and layer 0 rotates 4 pairs of features a head"),
        ({"long_rope": ROPE, "rope_factor": 2.0, **PARTIAL}, "has the same purpose as long_rope"),
    ],
)
def test_factors_that_do_not_fit_are_refused(keys, words, tiny_config):
    with pytest.raises(ValueError, match=words):
        tiny_config(**keys)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"short_factor": (1.0, 0.0, 1.0)}, "must be factors of at least 1e-06 and at most 1000000, got 0.0"),
        ({"short_factor": (1.0, 1e300, 1.0)}, "must be factors of at least 1e-06 and at most 1000000, got 1e.300"),
        ({"long_factor": (1.0, 2.0)}, "has 2 factors, and short_factor has 3"),
    ],
)
def test_impossible_factors_are_refused(keys, words):
    with pytest.raises(ValueError, match=words):
        attrs.evolve(ROPE, **keys)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_published_files_are_read_by_each_name_that_they_have_had(kind):
    table = Phi3Layout(None).model_table(PUBLISHED | {"rope_scaling": SCALING | {"type": kind}})

    factor = ROPE.magnitude(64)
    assert LongRope(**table["long_rope"]) == attrs.evolve(
        ROPE, short_factor=[1.0, 1.3, 2.0], long_factor=[1.5, 4.0, 9.0], attention_factor=factor
    )
    assert (table["rotary_fraction"], table["max_seq_len"]) == (0.75, 64)
    without = {key: value for key, value in PUBLISHED.items() if key != "original_max_position_embeddings"}
    assert Phi3Layout(None).model_table(without)["long_rope"]["original_max_seq_len"] == 4096


@pytest.mark.parametrize("keys", [{"full_attn_mod": 2}, {"interpolate_factor": 4}, {"lm_head_bias": True}])
def test_keys_of_phi_4_mini_that_would_say_something_are_refused(keys):
    (key,) = keys
    with pytest.raises(ConfigError, match=f"{key} = {keys[key]} is not supported"):
        Phi3Layout(None).model_table(PUBLISHED | keys)


def test_a_window_as_long_as_the_longest_sequence_is_none():
    assert not Phi3Layout(None).model_table(PUBLISHED | {"sliding_window": 64}).get("window")
    assert Phi3Layout(None).model_table(PUBLISHED | {"sliding_window": 63})["window"] == 63


def test_what_is_written_is_what_all_versions_of_transformers_read(tiny_config):
    written = Phi3Layout(None).config_json(tiny_config(long_rope=ROPE, **PARTIAL), 50)
    assert written["rope_scaling"] == SCALING
    assert written["original_max_position_embeddings"] == 12
    assert transformers.Phi3Config.from_dict(written).rope_parameters["rope_type"] == "longrope"

    own = tiny_config(long_rope=attrs.evolve(ROPE, attention_factor=1.5), **PARTIAL)
    assert Phi3Layout(None).config_json(own, 50)["rope_scaling"] == SCALING | {"attention_factor": 1.5}
