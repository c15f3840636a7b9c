"""The source ``token_files``, and the format of its files."""

import hashlib
import json

import numpy as np
import pytest

from forge_core.errors import ConfigError
from forge_plugins_data.config import TokenFilesConfig
from forge_plugins_data.shard_writer import ShardWriter
from forge_plugins_data.token_files import open_token_files
from forge_plugins_data.token_format import INDEX, Shard, TokenHeader, read_header, write_header
from forge_plugins_data.token_samples import TokenFacts
from forge_plugins_data.windows import Span, TokenWindows


@pytest.fixture
def open_tokens(build):
    def open_tokens(path, split="train", seq_len=8, **keys):
        config = TokenFilesConfig(path=path if isinstance(path, tuple) else str(path), **keys)
        return open_token_files(config, seq_len=seq_len, split=split, build=build)

    return open_tokens


def write_folder(folder, *shards, dtype="uint16", vocab_size=1000, sums=False, **header):
    """A prepared folder of these arrays, each file with a JSON of its own as well, which may have its checksum."""
    folder.mkdir(exist_ok=True)
    listed = []
    for i, tokens in enumerate(shards):
        content = np.asarray(tokens, dtype=dtype).tobytes()
        (folder / f"{i}.bin").write_bytes(content)
        largest, sha256 = int(np.max(tokens, initial=0)), hashlib.sha256(content).hexdigest() if sums else None
        listed.append(Shard(file=f"{i}.bin", tokens=len(tokens), max_id=largest, sha256=sha256))
    write_header(folder / INDEX, TokenHeader(dtype=dtype, vocab_size=vocab_size, shards=tuple(listed), **header))
    for shard in listed:
        described = TokenHeader(dtype=dtype, vocab_size=vocab_size, shards=(shard,), **header)
        write_header((folder / shard.file).with_suffix(".json"), described)
    return folder


def everything(source):
    return source.read(np.arange(len(source)))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_windows_follow_each_other_and_no_token_but_the_rest_is_lost(tmp_path, open_tokens, dtype):
    first, second = np.arange(3 * 8 + 1), np.arange(100, 100 + 2 * 8 + 8)  # no rest; a rest of 7
    folder = write_folder(tmp_path / "data", first, second, dtype=dtype)

    source = open_tokens(folder)
    batch = everything(source)

    assert len(source) == 5
    np.testing.assert_array_equal(batch["tokens"].ravel(), [*first[:24], *second[:16]])
    np.testing.assert_array_equal(batch["targets"].ravel(), [*first[1:25], *second[1:17]])
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int64


def test_a_file_that_two_paths_lead_to_is_read_once(tmp_path, open_tokens):
    folder = write_folder(tmp_path / "data", np.arange(33))
    (tmp_path / "link").symlink_to(folder)

    assert len(open_tokens((str(folder), str(tmp_path / "link" / "0.bin")))) == len(open_tokens(folder)) == 4


def test_an_even_number_of_small_ids_is_not_taken_for_half_as_many_large_ones(tmp_path, open_tokens):
    """The reference system guessed the type from the size and read such files as 65536, 196610, …"""
    batch = everything(open_tokens(write_folder(tmp_path / "data", np.arange(100)[:18])))

    assert batch["tokens"].ravel().tolist() == list(range(16))


def test_samples_can_be_read_in_any_order_and_repeatedly(tmp_path, open_tokens):
    rng = np.random.default_rng(0)
    lengths = [0, 1, 8, 9, 500, 3, 77]  # files too short for a window are in between
    source = open_tokens(write_folder(tmp_path / "data", *(rng.integers(0, 1000, n) for n in lengths)))
    whole = everything(source)
    indices = rng.integers(0, len(source), 300)

    batch = source.read(indices)

    assert len(source) == 1 + 62 + 9
    for name in batch:
        np.testing.assert_array_equal(batch[name], whole[name][indices])


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.999])
def test_held_out_windows_are_the_last_of_each_file_and_never_trained_on(tmp_path, open_tokens, fraction):
    lengths = [41, 400, 9, 1000, 0, 17]
    starts = np.cumsum([0, *lengths])
    shards = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    folder = write_folder(tmp_path / "data", *shards, dtype="uint32", vocab_size=10_000)

    whole = open_tokens(folder, "all", validation=fraction)
    train = everything(open_tokens(folder, "train", validation=fraction))["targets"]
    held_out = everything(open_tokens(folder, "validation", validation=fraction))["targets"]

    assert len(train) + len(held_out) == len(whole)
    assert len(held_out) == min(max(1, round(len(whole) * fraction)), len(whole) - 1)
    assert not set(train.ravel()) & set(held_out.ravel())
    for shard in shards:
        trained = train[np.isin(train, shard)]
        assert not trained.size or trained.max() < held_out[np.isin(held_out, shard)].min(initial=10_000)


def test_documents_are_kept_apart_when_asked(tmp_path, open_tokens):
    folder = write_folder(tmp_path / "data", [1, 2, 0, 3, 4, 5, 0, 6, 7], end_of_document=0)

    plain = everything(open_tokens(folder))
    packed = everything(open_tokens(folder, document_mask=True))

    assert plain.keys() == {"tokens", "targets"}
    assert plain["targets"].tolist() == [[2, 0, 3, 4, 5, 0, 6, 7]]
    assert packed["targets"].tolist() == [[2, 0, -100, 4, 5, 0, -100, 7]]
    assert packed["document"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 2]]
    assert packed["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]


def test_folders_files_and_patterns_name_the_same_data(tmp_path, open_tokens):
    folder = write_folder(tmp_path / "data", np.arange(40), np.arange(60))
    np.save(tmp_path / "more.npy", np.arange(20, dtype=np.int32))
    expected = everything(open_tokens(folder))["tokens"]

    np.testing.assert_array_equal(everything(open_tokens(folder / "*.bin"))["tokens"], expected)
    np.testing.assert_array_equal(
        everything(open_tokens((str(folder / "0.bin"), str(folder / "1.bin"))))["tokens"], expected
    )
    (folder / "1.json").unlink()  # the folder's index lists the file as well
    assert len(open_tokens(folder / "1.bin")) == 7
    assert len(open_tokens((str(folder), str(tmp_path / "*.npy")))) == 4 + 7 + 2


def test_numpy_files_need_a_vocabulary_and_are_read_to_check_it(tmp_path, open_tokens):
    np.save(tmp_path / "big_endian.npy", np.arange(50, dtype=">u2"))
    np.save(tmp_path / "negative.npy", np.array([3, -1] * 20, dtype=np.int64))

    source = open_tokens(tmp_path / "big_endian.npy", vocab_size=50)
    assert source.vocab_size == 50
    assert everything(source)["tokens"].ravel().tolist() == list(range(48))
    for path, keys, sentence in [
        ("big_endian.npy", {}, r"does not say how large its vocabulary is; set vocab_size or a tokenizer"),
        ("big_endian.npy", {"vocab_size": 49}, r"has the id 49, but the vocabulary has 49 \(ids 0 to 48\)"),
        ("negative.npy", {"vocab_size": 49}, r"negative\.npy has the id -1"),
        ("big_endian.npy", {"vocab_size": 50, "document_mask": True}, r"needs to know where documents end"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            open_tokens(tmp_path / path, **keys)


def test_the_tokenizer_comes_from_the_key_or_with_the_data(tmp_path, open_tokens, use_tokenizer):
    table = {"name": "forge-plugins-data:bytes"}
    carrying = write_folder(
        tmp_path / "carrying", np.arange(40), vocab_size=257, end_of_document=256, tokenizer=table,
        tokenizer_fingerprint="bytes-utf8-eod256",
    )  # fmt: skip
    foreign = write_folder(
        tmp_path / "foreign", np.arange(40), vocab_size=257, tokenizer=table, tokenizer_fingerprint="another"
    )
    np.save(tmp_path / "x.npy", np.arange(40))

    assert open_tokens(carrying).tokenizer.decode([104, 105, 256]) == "hi"
    assert open_tokens(tmp_path / "x.npy", tokenizer=use_tokenizer("bytes")).vocab_size == 257
    assert open_tokens(tmp_path / "x.npy", vocab_size=40).tokenizer is None
    with pytest.raises(ConfigError, match=r"0\.bin was made with another tokenizer \(fingerprint another\)"):
        open_tokens(foreign)


def test_all_ids_of_a_long_file_are_looked_at(tmp_path, open_tokens, monkeypatch):
    monkeypatch.setattr("forge_plugins_data.token_files._SCAN", 16)
    for id_ in (49, -1):
        np.save(tmp_path / "long.npy", np.array([id_, *range(48)]))
        with pytest.raises(ConfigError, match=rf"long\.npy has the id {id_}"):
            open_tokens(tmp_path / "long.npy", vocab_size=49)


def test_a_tokenizer_of_one_id_more_is_refused(tmp_path, open_tokens, use_tokenizer):
    folder = write_folder(tmp_path / "data", np.arange(33), vocab_size=256)

    with pytest.raises(ConfigError, match="vocab_size = 256 is less than the 257 of the tokenizer"):
        open_tokens(folder, tokenizer=use_tokenizer("bytes"))


def test_the_fingerprint_is_that_of_the_samples_wherever_the_folder_is(tmp_path, open_tokens):
    tokens = np.arange(100)
    first = open_tokens(write_folder(tmp_path / "a", tokens, end_of_document=0))
    moved = open_tokens(write_folder(tmp_path / "b", tokens, end_of_document=0), workers=4)

    assert first.fingerprint == moved.fingerprint
    different = [
        open_tokens(write_folder(tmp_path / "c", tokens[:-10], end_of_document=0)),
        open_tokens(tmp_path / "a", seq_len=9),
        open_tokens(tmp_path / "a", validation=0.1),
        open_tokens(tmp_path / "a", "validation", validation=0.1),
        open_tokens(tmp_path / "a", document_mask=True),
        open_tokens(write_folder(tmp_path / "d", tokens, end_of_document=0, sums=True)),
        open_tokens(write_folder(tmp_path / "e", tokens[::-1], end_of_document=0, sums=True)),
    ]
    assert len({first.fingerprint, *(source.fingerprint for source in different)}) == 8


def test_damaged_files_are_refused_with_a_sentence(tmp_path, open_tokens):
    def broken(name, damage):
        folder = write_folder(tmp_path / name, np.arange(40), np.arange(60), end_of_document=0)
        damage(folder)
        return folder

    def edit(**changes):
        def damage(folder):
            content = json.loads((folder / INDEX).read_text())
            (folder / INDEX).write_text(json.dumps(content | changes))

        return damage

    shard = {"file": "0.bin", "tokens": 40}
    for name, damage, sentence in [
        (
            "cut",
            lambda f: (f / "1.bin").write_bytes(b"\0" * 118),
            r"1\.bin is truncated: 60 tokens of uint16 are 120 .*118",
        ),
        ("long", lambda f: (f / "1.bin").write_bytes(b"\0" * 122), r"1\.bin is longer than it should be"),
        ("gone", lambda f: (f / "1.bin").unlink(), r"1\.bin is missing"),
        ("text", lambda f: (f / INDEX).write_text("{"), r"index\.json is damaged: it is not JSON"),
        ("other", lambda f: (f / INDEX).write_text("{}"), r"index\.json does not describe token files"),
        ("later", edit(version=2), r"index\.json has version 2 of the format; this forge-plugins-data reads 1"),
        ("dtype", edit(dtype="float16"), r"index\.json is damaged: dtype: must be one of 'uint8', .* got \"float16\""),
        ("count", edit(shards=[shard | {"tokens": "40"}]), r"damaged: shards\[0\]\.tokens: expected an integer, got"),
        (
            "outside",
            edit(shards=[shard | {"file": "../0.bin"}]),
            r"shards\[0\]\.file: must be the name of a file",
        ),
        ("none", edit(shards=[]), r"index\.json is damaged: shards: it lists no file"),
        ("deep", lambda f: (f / INDEX).write_text("[" * 100_000), r"index\.json is damaged: it is not JSON"),
        ("huge", edit(vocab_size=2**40), r"index\.json is damaged: vocab_size: must be at most 4294967296"),
        ("long tokens", edit(shards=[shard | {"tokens": 2**62}]), r"shards\[0\]\.tokens: must be less than"),
        ("words", edit(shards="0.bin"), r"damaged: shards: expected an array, got the string"),
        ("lacking", edit(shards=[{"file": "0.bin"}]), r"damaged: .*tokens"),
        ("strange", edit(colour="red"), r"damaged: .*colour"),
        ("ids", edit(vocab_size=59), r"1\.bin has the id 59, but the vocabulary has 59"),
        (
            "unfinished",
            lambda f: (f / INDEX).rename(f / "settings.json"),
            r"preparing .* was not finished; run the same",
        ),
        ("unprepared", lambda f: (f / INDEX).unlink(), r"has no index\.json, so it was not written by .*\*\.bin"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            open_tokens(broken(name, damage))


def test_numpy_files_that_are_damaged_or_of_another_kind_are_refused(tmp_path, open_tokens):
    np.save(tmp_path / "good.npy", np.arange(100))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "good.npy").read_bytes()[:-1])
    np.save(tmp_path / "square.npy", np.zeros((10, 10), dtype=int))
    np.save(tmp_path / "floats.npy", np.zeros(100))
    (tmp_path / "empty.npy").touch()
    for name, sentence in [
        ("cut", r"cut\.npy is truncated or not a \.npy file"),
        ("empty", r"empty\.npy is truncated or not a \.npy file"),
        ("square", r"square\.npy must hold one row of integers; it is an array of int64 of shape \(10, 10\)"),
        ("floats", r"floats\.npy must hold one row of integers"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            open_tokens(tmp_path / f"{name}.npy", vocab_size=1000)


def test_a_bare_file_is_not_guessed_at_and_the_sentence_says_what_to_write(tmp_path, open_tokens):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "x.bin")

    with pytest.raises(ConfigError, match=r"x\.bin has no description") as caught:
        open_tokens(tmp_path / "x.bin")
    described = str(caught.value).splitlines()[1].strip()
    (tmp_path / "x.json").write_text(described.replace("…", "100"))

    assert everything(open_tokens(tmp_path / "x.bin", seq_len=99))["targets"].tolist() == [list(range(1, 100))]


def test_contradictions_and_data_too_small_are_refused(tmp_path, open_tokens):
    a = write_folder(tmp_path / "a", np.arange(9), end_of_document=0)
    b = write_folder(tmp_path / "b", np.arange(20), vocab_size=999)
    for path, keys, sentence in [
        ((str(a), str(b)), {}, r"0\.bin has vocab_size 999, but .*0\.bin has 1000; they cannot be mixed"),
        (a, {"vocab_size": 5}, r"vocab_size = 5 contradicts .*0\.bin, which says 1000; remove the key"),
        (a, {"end_of_document": 5, "document_mask": True}, r"end_of_document = 5 contradicts"),
        (a, {"seq_len": 9}, r"too small: .* at least seq_len \+ 1 = 10 consecutive tokens, and there are 9"),
        (a, {"validation": 0.5}, r"validation = 0\.5 cannot hold out a sample: the data have 1 of 8 tokens"),
        (a, {"split": "validation"}, r"validation = 0 holds nothing out"),
        (tmp_path / "aa", {}, r"there is no file or folder .*aa\. Did you mean .*a\?"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            open_tokens(path, **keys)


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path):
    file = tmp_path / "tokens.bin"
    with ShardWriter(file, dtype="uint16", end_of_document=9) as writer:
        writer.add(np.array([1, 2]))
        writer.add(np.array([], dtype=np.int64))
        writer.add(None)
        writer.add(np.array([3]))
        assert not file.exists()
        shard = writer.finish()

    assert np.fromfile(file, dtype="<u2").tolist() == [1, 2, 9, 3, 9]
    assert (shard.tokens, shard.documents, shard.skipped, shard.max_id) == (5, 2, 2, 9)


def test_headers_come_back_as_they_were_written(tmp_path):
    header = TokenHeader(
        dtype="uint32", vocab_size=10, end_of_document=3, tokenizer={"name": "x"}, tokenizer_fingerprint="y",
        shards=(Shard(file="0.bin", tokens=5, documents=1, skipped=0, max_id=7, sha256="z"), Shard(file="1", tokens=0)),
    )  # fmt: skip
    write_header(tmp_path / INDEX, header)

    assert read_header(tmp_path / INDEX) == header
    assert [file.name for file in tmp_path.iterdir()] == [INDEX]


@pytest.mark.parametrize(("dtype", "strange"), [("uint16", 1000), ("uint16", 65535), ("int32", -1), ("int64", 2**40)])
def test_an_id_beyond_the_vocabulary_that_comes_after_the_file_was_opened_is_named_where_it_is_read(
    tmp_path, open_tokens, dtype, strange
):
    folder = write_folder(tmp_path, np.arange(50), np.arange(90), dtype=dtype)
    source = open_tokens(folder, validation=0.25)
    tokens = np.memmap(folder / "1.bin", dtype=dtype, mode="r+")
    tokens[16] = strange  # the last target of one sample, the first token of the next

    for index in (6, 7):
        with pytest.raises(
            ConfigError, match=rf"1\.bin: token 16 \(from 0\) has the id {strange}, but the .* has 1000"
        ):
            source.read(np.array([0, index]))
    assert source.read(np.array([0, 5, 8]))["tokens"].shape == (3, 8)


def test_an_id_beyond_the_vocabulary_at_the_start_of_a_file_is_named_with_that_file(tmp_path, open_tokens):
    folder = write_folder(tmp_path, np.arange(50), np.arange(90))
    source = open_tokens(folder)
    np.memmap(folder / "1.bin", dtype="uint16", mode="r+")[0] = 1000

    with pytest.raises(ConfigError, match=r"1\.bin: token 0 \(from 0\) has the id 1000"):
        source.read(np.arange(len(source)))


@pytest.fixture
def prepared(tmp_path):
    """Three files with checksums."""
    shards = []
    for i in range(3):
        with ShardWriter(tmp_path / f"{i}.bin", dtype="uint16", end_of_document=0) as writer:
            writer.add(np.arange(1, 100) + i)
            shards.append(writer.finish())
    write_header(tmp_path / INDEX, TokenHeader(dtype="uint16", vocab_size=1000, shards=tuple(shards)))
    return tmp_path


def flip_bit(file):
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_within_the_vocabulary_is_told_once_after_the_first_read(prepared, open_tokens):
    flip_bit(prepared / "1.bin")
    source, told = open_tokens(prepared), []

    source.refuse_damaged()
    source.watch(told.append)
    for index in (0, 0, 14):
        source.read(np.array([index]))
        source._verification.finish()

    (sentence,) = told
    assert sentence.startswith(f"{prepared / '1.bin'} is damaged: its checksum is not the one of its JSON")


def test_damage_is_refused_before_the_first_step_or_never_looked_for_if_that_is_asked_for(prepared, open_tokens):
    open_tokens(prepared, verify="before").refuse_damaged()
    flip_bit(prepared / "2.bin")

    with pytest.raises(ConfigError, match=r"2\.bin is damaged: its checksum is not the one of its JSON"):
        open_tokens(prepared, verify="before").refuse_damaged()
    never = open_tokens(prepared, verify="never")
    never.refuse_damaged()
    never.watch(pytest.fail)
    never.read(np.arange(30))


def test_verifying_files_without_checksums_is_refused(tmp_path, open_tokens):
    with pytest.raises(ConfigError, match=r'verify = "before" has no effect: no file has a checksum'):
        open_tokens(write_folder(tmp_path, np.arange(50)), verify="before")


def test_a_stranger_is_named_by_its_place_in_the_file_also_where_only_the_end_of_it_is_read():
    tokens = np.arange(17)
    tokens[13] = 99
    facts = TokenFacts(seq_len=4, vocab_size=50, tokenizer=None, separator=None, identity=[])

    with pytest.raises(ConfigError, match=r"^file: token 13 \(from 0\) has the id 99, but the vocabulary has 50"):
        TokenWindows([Span(tokens, 2, 4, "file")], facts).read(np.array([0, 1]))
