"""The source ``mixture``: shares at every position, epochs of each source, one batch."""

from types import SimpleNamespace

import numpy as np
import pytest

from forge_core.config.builder import ComponentBuilder
from forge_core.data.loader import BatchLoader
from forge_core.data.stream import SampleStream
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_data.interleaving import Interleaving, InterleavingInPhases
from forge_plugins_data.mixture_parts import MixtureParts, Part
from forge_plugins_data.token_samples import TokenFacts
from forge_plugins_data.windows import Span, TokenWindows

SEQ_LEN = 4


@pytest.fixture(scope="module")
def builder():
    return ComponentBuilder(discover(frozenset()))


@pytest.fixture
def open_mixture(builder, tmp_path):
    """``open_mixture({"a": (2, 300), "b": (1, 70)})``: weight and characters of each source, all of one letter."""

    def open_mixture(sources, split="train", seed=0, keys=None, phases=(), loss_weights=None, **more):
        tables = []
        for name, (weight, length) in sources.items():
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            for part in range(4):
                (folder / f"{part}.txt").write_text(name * (length // 4))
            source = {"name": "text_files", "path": str(folder), **(keys or {}).get(name, {})}
            of_loss = {"loss_weight": loss_weights[name]} if name in (loss_weights or {}) else {}
            tables.append({"name": name, "weight": weight, **of_loss, "source": source})
        use = builder.resolve("data_source", {"name": "mixture", "sources": tables, **more})
        phases = [(start, type(use.config).Phase(weights=weights)) for start, weights in phases]
        return builder(use, seq_len=SEQ_LEN, split=split, seed=seed, samples_per_step=8, phases=phases)

    return open_mixture


def weights():
    rng = np.random.default_rng(0)
    yield from (np.ones(k) for k in (2, 3, 7, 17, 64))
    yield from (rng.random(k) for k in (2, 3, 8, 33, 64))
    yield from (rng.random(k) ** 8 for k in (4, 16, 64))
    yield np.array([0.9, *[0.1 / 63] * 63])  # one that is worth more than all others together
    yield 1.618 ** -np.arange(30.0)  # a tree as deep as there can be
    yield np.array([1e-9, 1.0])


@pytest.mark.parametrize("weights", [*weights()], ids=lambda weights: str(len(weights)))
def test_counts_are_within_2_of_weight_times_position_at_every_position_up_to_a_million(weights):
    n = 1_000_000
    interleaving = Interleaving(weights.tolist())

    which, number = interleaving.at(np.arange(n))

    for source, share in enumerate(weights / weights.sum()):
        places = np.flatnonzero(which == source)
        np.testing.assert_array_equal(number[places], np.arange(len(places)))
        # the error is largest right before and right after a sample of the source
        before = np.arange(len(places)) - share * places
        after = np.arange(1, len(places) + 1) - share * (places + 1)
        last = len(places) - share * n
        assert max(abs(before).max(initial=0), abs(after).max(initial=0), abs(last)) < 2
        assert interleaving.counts(777_777)[source] == np.searchsorted(places, 777_777)


def test_far_positions_are_as_exact_as_the_first_ones():
    interleaving = Interleaving([0.7, 0.2, 0.1])
    far = 2**40 + np.arange(1000)

    which, number = interleaving.at(far)

    assert interleaving.counts(2**40 + 1000) == [
        before + int((which == source).sum()) for source, before in enumerate(interleaving.counts(2**40))
    ]
    assert sum(interleaving.counts(2**40)) == 2**40
    assert number[which == 0][0] == interleaving.counts(2**40)[0]


def test_in_each_phase_sources_have_its_weights_and_go_on_where_they_were():
    phases = [(0, [1.0, 1.0, 0.0]), (1000, [0.0, 1.0, 3.0]), (1400, [1.0, 0.0, 0.0])]
    interleaving = InterleavingInPhases(phases)

    which, number = interleaving.at(np.arange(2000))

    assert [np.bincount(which[part], minlength=3).tolist() for part in np.split(np.arange(2000), [1000, 1400])] == [
        [500, 500, 0],
        [0, 100, 300],
        [600, 0, 0],
    ]
    for source in range(3):
        np.testing.assert_array_equal(number[which == source], np.arange((which == source).sum()))
    for position in (0, 999, 1000, 1001, 1399, 1400, 1999):
        assert interleaving.counts(position) == np.bincount(which[:position], minlength=3).tolist()


def test_positions_in_any_order_have_the_source_and_the_number_of_each_by_itself():
    interleaving = InterleavingInPhases([(0, [2.0, 1.0])])
    far_before_near = np.array([10_000, 5, 10_000 - 4096])

    which, number = interleaving.at(far_before_near)

    alone = [interleaving.at(np.array([position])) for position in far_before_near]
    assert [*zip(which.tolist(), number.tolist(), strict=True)] == [(w.item(), n.item()) for w, n in alone]


def test_a_phase_changes_what_follows_and_nothing_before(open_mixture):
    sources = {"a": (3, 400), "b": (1, 400)}
    plain, phased = open_mixture(sources), open_mixture(sources, phases=[(40, {"a": 0.0})])

    before, after = np.arange(40), np.arange(40, 80)
    np.testing.assert_array_equal(plain.read_at(before)["tokens"], phased.read_at(before)["tokens"])
    assert set(phased.read_at(after)["source"].tolist()) == {1}
    assert plain.fingerprint == phased.fingerprint


def test_a_phase_begins_with_its_step_where_samples_before_it_are_left_out(open_mixture):
    """It began as many steps too early as a rollback had left out."""
    phased = open_mixture({"a": (3, 400), "b": (1, 400)}, phases=[(40, {"a": 0.0})])
    plain = SampleStream(open_mixture({"a": (3, 400), "b": (1, 400)}), seed=0, shuffle=False, left_out=[(16, 24)])
    stream = SampleStream(phased, seed=0, shuffle=False)
    stream.read(np.arange(80))

    stream = stream.without(16, 24).without(48, 56)

    before, after = np.arange(40), np.arange(40, 80)
    np.testing.assert_array_equal(stream.read(before)["tokens"], plain.read(before)["tokens"])
    assert set(stream.read(after)["source"].tolist()) == {1}
    assert stream.counts(80) == {"a": np.sum(stream.read(before)["source"] == 0), "b": 50}


def test_samples_that_are_left_out_around_the_start_of_a_phase_do_not_come_back(open_mixture):
    phased = open_mixture({"a": (3, 400), "b": (1, 400)}, phases=[(40, {"a": 0.0})])
    stream = SampleStream(phased, seed=0, shuffle=False)
    behind = stream.read(np.arange(46, 82))

    stream = stream.without(40, 42).without(36, 44)  # two of its positions are behind those that were left out before

    np.testing.assert_array_equal(stream.read(np.arange(36, 72))["tokens"], behind["tokens"])


def test_batches_have_each_source_s_samples_and_its_number(open_mixture):
    source = open_mixture({"a": (3, 400), "b": (1, 400)})

    batch = source.read_at(np.arange(400))

    assert set(map(tuple, batch["tokens"][:, :1].tolist())) <= {(97,), (98,), (256,)}
    letters = np.where((batch["tokens"] == 97).any(axis=1), 0, 1)
    np.testing.assert_array_equal(batch["source"], letters)
    assert np.bincount(batch["source"]).tolist() == source.counts(400) == [300, 100]
    assert source.names == ("a", "b")


def test_batches_around_the_end_of_what_is_found_at_once_are_those_of_each_position(open_mixture, tmp_path):
    (tmp_path / "letters.txt").write_text("0123456789abcdefghijklmnopqrstuvwxyz")
    source = open_mixture({"a": (3, 400), "b": (1, 400)}, keys={"a": {"path": str(tmp_path / "letters.txt")}})
    positions = np.arange(4092, 4100)

    for some in (positions[:5], positions[4:], positions, positions[::-1]):
        tokens = [source.read_at(one)["tokens"] for one in np.split(some, len(some))]
        np.testing.assert_array_equal(source.read_at(some)["tokens"], np.concatenate(tokens))


def test_targets_have_the_loss_weight_of_their_source(open_mixture):
    sources = {"a": (3, 400), "b": (1, 400)}
    plain, weighed = open_mixture(sources), open_mixture(sources, loss_weights={"b": 2.5})

    batch = weighed.read_at(np.arange(40))

    assert "weights" not in plain.read_at(np.arange(40))
    assert plain.fingerprint == weighed.fingerprint  # the samples are the same, so that a run may go on with others
    assert batch["weights"].dtype == np.float32
    assert batch["weights"].shape == batch["targets"].shape
    np.testing.assert_array_equal(batch["weights"][:, 0], np.where(batch["source"] == 1, 2.5, 1))
    only_a = weighed.read_at(np.flatnonzero(batch["source"] == 0)[:2])
    assert (only_a["weights"] == 1).all()


def test_weights_within_a_source_are_multiplied_by_its_own(open_mixture, monkeypatch):
    mixture = open_mixture({"a": (1, 400), "b": (1, 400)}, loss_weights={"a": 2.0})
    stream = mixture._parts.parts[0]._stream
    monkeypatch.setattr(
        stream, "read", lambda numbers, read=stream.read: {**(b := read(numbers)), "weights": 0.5 + 0.0 * b["tokens"]}
    )

    batch = mixture.read_at(np.arange(40))

    np.testing.assert_array_equal(batch["weights"][:, 0], np.where(batch["source"] == 0, 1, 1))
    assert set(np.unique(batch["source"])) == {0, 1}


def test_padding_of_one_source_is_known_as_such(open_mixture):
    keys = {"a": {"packing": "best_fit", "document_mask": False}, "b": {"document_mask": False}}
    mixture = open_mixture({"a": (1, 72), "b": (1, 300)}, keys=keys)

    batch = mixture.read_at(np.arange(24))

    is_padding = batch["positions"] == -1
    assert is_padding[batch["source"] == 0].any()
    assert (batch["targets"][is_padding] == -100).all()
    assert (batch["positions"][batch["source"] == 1] == np.arange(SEQ_LEN)).all()
    assert "positions" in mixture.read_at(np.flatnonzero(batch["source"] == 1)[:1])  # batches have the same entries


def test_each_source_goes_through_its_own_epochs_each_in_another_order(open_mixture, tmp_path):
    (tmp_path / "letters.txt").write_text("0123456789abcdefghijklmnopqrstuvwxyz")
    source = open_mixture({"a": (1, 40), "b": (1, 4000)}, keys={"a": {"path": str(tmp_path / "letters.txt")}})
    n = source.parts[0].samples

    batch = source.read_at(np.arange(6 * n))
    of_a = batch["tokens"][batch["source"] == 0][: 3 * n].reshape(3, n, SEQ_LEN)

    epochs = [sorted(map(tuple, epoch.tolist())) for epoch in of_a]
    assert epochs[0] == epochs[1] == epochs[2]
    assert not np.array_equal(of_a[0], of_a[1])


def test_each_source_has_an_order_of_its_own_that_follows_from_the_seed_and_its_name(open_mixture):
    def orders(names, seed):
        which, indices = open_mixture(dict.fromkeys(names, (1, 400)), seed=seed).samples_at(np.arange(90))
        return {name: indices[which == source][:30].tolist() for source, name in enumerate(names)}

    both = orders("ab", seed=0)

    assert both["a"] != both["b"]
    assert both["a"] != orders("ab", seed=1)["a"]
    assert both["a"] == orders("acb", seed=0)["a"]  # beside any others


def test_other_weights_are_other_data(open_mixture):
    assert (
        open_mixture({"a": (2, 40), "b": (1, 40)}).fingerprint != open_mixture({"a": (1, 40), "b": (1, 40)}).fingerprint
    )


def test_the_samples_are_the_same_on_any_number_of_ranks(open_mixture):
    def step(dp_size, position):
        samples = []
        for rank in range(dp_size):
            source = open_mixture({"a": (2, 400), "b": (1, 300)})
            loader = BatchLoader(
                SampleStream(source, 0, True),
                position=position,
                batch_size=12 // dp_size,
                grad_accumulation=1,
                dp_rank=rank,
                dp_size=dp_size,
                workers=0,
                prefetch=1,
                pin_memory=False,
            )
            (batch,) = next(loader)
            samples += zip(map(tuple, batch["tokens"].tolist()), batch["source"].tolist(), strict=True)
        return samples

    assert step(1, 24) == step(2, 24) == step(4, 24)
    stream = SampleStream(open_mixture({"a": (2, 400), "b": (1, 300)}), 0, True, [(6, 12)])
    assert stream.counts(12) == {"a": 8, "b": 4}  # of positions 0 to 5 and 12 to 17
    assert stream.counts(3) == {"a": 2, "b": 1}


def test_temperature_brings_shares_together(open_mixture):
    shares = {t: open_mixture({"a": (8, 40), "b": (1, 40)}, temperature=t).shares for t in (1.0, 3.0, 0.5)}

    np.testing.assert_allclose(shares[1.0], [8 / 9, 1 / 9])
    np.testing.assert_allclose(shares[3.0], [2 / 3, 1 / 3])  # 8^(1/3) = 2
    np.testing.assert_allclose(shares[0.5], [64 / 65, 1 / 65])


def test_evaluation_has_all_that_is_held_out_and_a_part_of_it_has_all_sources(open_mixture):
    keys = {"a": {"validation": 0.4}, "b": {"validation": 0.4}, "c": {}}
    source = open_mixture({"a": (1, 4000), "b": (9, 1000), "c": (1, 400)}, "validation", keys=keys)

    batch = source.read(np.arange(len(source)))

    held_out = np.bincount(batch["source"], minlength=3)
    assert held_out[0] > held_out[1] > 0 == held_out[2]
    first = np.bincount(batch["source"][: len(source) // 4], minlength=2)
    np.testing.assert_allclose(first[:2] / first.sum(), held_out[:2] / held_out.sum(), atol=0.1)


def test_a_source_of_weight_0_is_not_read(open_mixture):
    source = open_mixture({"a": (1, 40), "b": (0, 40)})

    assert source.counts(100) == [100, 0]
    assert set(source.read_at(np.arange(50))["source"]) == {0}


@pytest.mark.parametrize(
    ("sources", "sentence"),
    [
        ({"a": (0, 40), "b": (0, 40)}, "has weights that are all 0"),
        ({"a": (-1, 40), "b": (1, 40)}, r"sources\[0\]\.weight: must be at least 0.0, got -1"),
        ({}, "must have at least one source"),
    ],
)
def test_weights_that_mean_nothing_are_refused(open_mixture, sources, sentence):
    with pytest.raises(ConfigError, match=sentence):
        open_mixture(sources)


def test_loss_weights_that_mean_nothing_are_refused(open_mixture):
    with pytest.raises(ConfigError, match="a loss_weight of 0 for each source with a weight"):
        open_mixture({"a": (1, 40), "b": (0, 40)}, loss_weights={"a": 0})
    with pytest.raises(ConfigError, match=r"sources\[0\]\.loss_weight: must be at least 0.0, got -1"):
        open_mixture({"a": (1, 40)}, loss_weights={"a": -1})


def test_what_does_not_go_together_is_refused(builder, open_mixture):
    sources = {"a": (1, 40), "b": (1, 40)}
    with pytest.raises(ConfigError, match="batches of source 'b' have the entry 'document', and those of 'a' have not"):
        open_mixture(sources, keys={"b": {"document_mask": True}})
    with pytest.raises(ConfigError, match=r"source 'b': the train part of the text .* is too small"):
        open_mixture({"a": (1, 40), "b": (1, 4)}, keys={"b": {"exclude": ["[123].txt"]}})
    with pytest.raises(ConfigError, match="no source holds anything out; set validation in one"):
        open_mixture(sources, "validation")
    twice = [{"name": "a", "weight": 1, "source": {"name": "text_files", "path": "x"}}] * 2
    with pytest.raises(ConfigError, match="names the source 'a' twice; give each a name of its own"):
        builder.resolve("data_source", {"name": "mixture", "sources": twice})


def test_counts_keep_to_their_weights_beyond_32_bits():
    weights = [0.5, 0.3, 0.2]

    counts = Interleaving(weights).counts(2**40 + 12_345)

    assert [abs(count - weight * (2**40 + 12_345)) < 300 for count, weight in zip(counts, weights, strict=True)] == [
        True
    ] * 3


@pytest.mark.parametrize("place", [5, 8])
def test_an_id_that_one_of_two_sources_does_not_know_is_refused_also_as_the_last_target(place):
    tokens = np.arange(9)
    sources = [
        TokenWindows(
            [Span(tokens, 0, 2, f"{vocab_size}")],
            TokenFacts(seq_len=4, vocab_size=vocab_size, tokenizer=None, separator=None, identity=[]),
        )
        for vocab_size in (50, 100)
    ]
    parts = [Part(SimpleNamespace(name=str(index), loss_weight=1), one, 0) for index, one in enumerate(sources)]
    together = MixtureParts.of(parts, ("0", "1"))
    tokens[place] = 60

    assert together.vocab_size == 100
    assert (together.read_windows(np.array([1, 1]), np.array([0, 1]))["tokens"] == tokens[:8].reshape(2, 4)).all()
    with pytest.raises(ConfigError, match=rf"^50: token {place} \(from 0\) has the id 60, but the vocabulary has 50"):
        together.read_windows(np.array([1, 0]), np.array([0, 1]))


def test_sources_of_two_tokenizers_are_refused():
    parts = []
    for name in ("one", "other"):
        facts = TokenFacts(
            seq_len=4, vocab_size=50, tokenizer=SimpleNamespace(fingerprint=name), separator=None, identity=[]
        )
        source = TokenWindows([Span(np.arange(9), 0, 2)], facts)
        parts.append(Part(SimpleNamespace(name=name, loss_weight=1), source, 0))

    with pytest.raises(ConfigError, match="source 'other' has another tokenizer than 'one', so that their ids do not"):
        MixtureParts.of(parts, ("one", "other"))
