"""The source ``synthetic``: a Markov chain that can be learned, and has no end."""

from collections import Counter, defaultdict
from math import log

import numpy as np
import pytest

from forge_core.errors import ConfigError
from forge_plugins_data.synthetic import Chain, open_synthetic
from forge_plugins_data.synthetic_config import SyntheticConfig

ENTROPY = {1: 0.0, 2: 0.6365141682948128, 4: 1.1369165918330009}
"""Of shares 1, ½, ¼, … brought to a sum of 1, in nats: −Σ p ln p by hand."""


def opened(split="train", seq_len=64, seed=0, **keys):
    return open_synthetic(SyntheticConfig(**keys), seq_len=seq_len, split=split, seed=seed)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("branching", [1, 2, 4])
def test_what_follows_a_context_has_the_entropy_that_the_documentation_states(order, branching):
    source = opened(vocab_size=12, order=order, branching=branching)
    batch = source.read_at(np.arange(4000))
    walks = np.concatenate([batch["tokens"], batch["targets"][:, -1:]], axis=1)

    followers = defaultdict(Counter)
    for start in range(walks.shape[1] - order):
        for walk in walks[:, start : start + order + 1].tolist():
            followers[tuple(walk[:-1])][walk[-1]] += 1
    total = sum(count.total() for count in followers.values())
    entropy = -sum(n * log(n / count.total()) for count in followers.values() for n in count.values()) / total

    assert entropy == pytest.approx(ENTROPY[branching], abs=0.01)
    assert max(map(len, followers.values())) == branching
    chain = Chain(SyntheticConfig(vocab_size=12, order=order, branching=branching))
    for context, count in followers.items():
        assert set(count) <= set(chain.following(np.array(context)).tolist())


def test_the_chain_is_the_same_in_every_run_and_its_samples_follow_from_the_seed():
    first, again, other = (opened(seed=seed).read_at(np.arange(8))["tokens"] for seed in (0, 0, 1))

    np.testing.assert_array_equal(first, again)
    assert not (first == other).all(axis=1).any()
    assert not np.array_equal(first, opened(chain=1).read_at(np.arange(8))["tokens"])


def test_evaluation_has_other_walks_of_the_same_chain():
    source = opened("validation", validation=16)

    held_out = source.read(np.arange(len(source)))

    assert len(source) == 16
    trained = opened(validation=16).read_at(np.arange(512))
    chain = Chain(SyntheticConfig())
    for batch in (trained, held_out):
        for token, target in zip(batch["tokens"][:16].flat, batch["targets"][:16].flat, strict=True):
            assert target in chain.following(np.array([token]))
    assert not {row.tobytes() for row in trained["tokens"]} & {row.tobytes() for row in held_out["tokens"]}


def test_an_evaluation_without_samples_is_refused():
    with pytest.raises(ConfigError, match=r"validation = 0 holds nothing out; set it to a number of samples"):
        opened("validation")


def test_the_fingerprint_is_another_for_each_key_by_which_samples_are_others():
    given = {"chain": 0, "order": 1, "branching": 4, "vocab_size": 12, "seq_len": 64, "split": "train", "validation": 9}
    others = {"chain": 1, "order": 2, "branching": 2, "vocab_size": 13, "seq_len": 32, "split": "validation"}
    every = [given, *({**given, key: value} for key, value in others.items())]

    assert len({opened(**keys).fingerprint for keys in every}) == 7
