"""``token_files`` on what other programs write; each format is written here byte by byte, from its published layout."""

import json
import struct

import numpy as np
import pytest

from forge_core.errors import ConfigError
from forge_plugins_data.config import TokenFilesConfig
from forge_plugins_data.token_files import open_token_files

TOKENS = np.random.default_rng(0).integers(0, 300, 101)
MEGATRON = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 8}
LITDATA = {"i2": 14, "i4": 16, "i8": 18, "u2": 20}


@pytest.fixture
def open_tokens(build):
    def open_tokens(path, split="train", **keys):
        config = TokenFilesConfig(path=str(path), **{"vocab_size": 300, **keys})
        return open_token_files(config, seq_len=10, split=split, build=build)

    return open_tokens


def write_megatron(prefix, dtype="u2", tokens=TOKENS):
    lengths = [30, 1, len(tokens) - 31]
    width = np.dtype(dtype).itemsize
    prefix.with_suffix(".bin").write_bytes(tokens.astype(f"<{dtype}").tobytes())
    index = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, MEGATRON[dtype]) + struct.pack("<QQ", 3, 4)
    index += (
        struct.pack("<3i", *lengths) + struct.pack("<3q", 0, 30 * width, 31 * width) + struct.pack("<4q", 0, 1, 2, 3)
    )
    prefix.with_suffix(".idx").write_bytes(index)
    return prefix.with_suffix(".bin")


def write_datatrove(file, dtype="u2", tokens=TOKENS):
    width = np.dtype(dtype).itemsize
    file.write_bytes(tokens.astype(f"<{dtype}").tobytes())
    file.with_name(file.name + ".index").write_bytes(struct.pack("<2Q", 50, len(tokens)))
    file.with_name(file.name + ".metadata").write_text(f"openai-community/gpt2|{width}\n{len(tokens)}\n101 T")
    return file


def write_litdata(folder, dtype="i4", tokens=TOKENS, cut=60):
    folder.mkdir(exist_ok=True)
    chunks = []
    for number, part in enumerate((tokens[:cut], tokens[cut:])):
        items = [part[:7].astype(f"<{dtype}").tobytes(), part[7:].astype(f"<{dtype}").tobytes()]
        header = 4 * (1 + len(items) + 1)
        offsets = np.cumsum([header, *map(len, items)]).astype("<u4").tobytes()
        (folder / f"chunk-0-{number}.bin").write_bytes(struct.pack("<I", len(items)) + offsets + b"".join(items))
        chunks.append({"chunk_bytes": sum(map(len, items)), "chunk_size": 2, "dim": len(part)})
        chunks[-1]["filename"] = f"chunk-0-{number}.bin"
    config = {"compression": None, "data_format": [f"no_header_tensor:{LITDATA[dtype]}"], "item_loader": "TokensLoader"}
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config, "updated_at": "1.0"}))
    return folder


def windows_of(tokens):
    starts = range(0, len(tokens) - 10, 10)
    return [tokens[start : start + 10].tolist() for start in starts], [tokens[s + 1 : s + 11].tolist() for s in starts]


def refuse(open_tokens, sentence, path, **keys):
    with pytest.raises(ConfigError, match=sentence):
        open_tokens(path, **keys)


@pytest.mark.parametrize("dtype", ["u2", "i4", "i8"])
def test_megatron(tmp_path, open_tokens, dtype):
    file = write_megatron(tmp_path / "text_document", dtype)

    for path in (file, file.with_suffix(".idx"), tmp_path / "*"):
        batch = open_tokens(path).read(np.arange(10))

        assert (batch["tokens"].tolist(), batch["targets"].tolist()) == windows_of(TOKENS)


@pytest.mark.parametrize("dtype", ["u2", "u4"])
def test_datatrove_and_nanotron(tmp_path, open_tokens, dtype):
    batch = open_tokens(write_datatrove(tmp_path / "000_shuffled.ds", dtype)).read(np.arange(10))

    assert (batch["tokens"].tolist(), batch["targets"].tolist()) == windows_of(TOKENS)


@pytest.mark.parametrize("dtype", ["u2", "i4", "i8"])
def test_litgpt(tmp_path, open_tokens, dtype):
    write_litdata(tmp_path / "train", dtype)
    expected = windows_of(TOKENS[:60])[0] + windows_of(TOKENS[60:])[0]

    for path in (tmp_path / "train", tmp_path / "train" / "*.bin"):
        source = open_tokens(path)

        assert source.read(np.arange(len(source)))["tokens"].tolist() == expected


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_nothing_but_ids_of_a_stated_type(tmp_path, open_tokens, dtype):
    (tmp_path / "a.bin").write_bytes(TOKENS.astype(dtype).tobytes())

    batch = open_tokens(tmp_path / "a.bin", dtype=dtype).read(np.arange(10))

    assert (batch["tokens"].tolist(), batch["targets"].tolist()) == windows_of(TOKENS)


def test_a_type_that_is_not_stated_is_not_guessed(tmp_path, open_tokens):
    (tmp_path / "a.bin").write_bytes(TOKENS[:100].astype("<u2").tobytes())
    (tmp_path / "a.ds").write_bytes(TOKENS[:100].astype("<u2").tobytes())

    refuse(open_tokens, r'cannot be guessed from its size. Set dtype = "uint16"', tmp_path / "a.bin")
    refuse(open_tokens, r"a\.ds\.metadata is not beside it, which says how many bytes an id has", tmp_path / "a.ds")
    assert len(open_tokens(tmp_path / "a.ds", dtype="uint16")) == 9


def test_a_wrong_type_is_found(tmp_path, open_tokens):
    (tmp_path / "a.bin").write_bytes(TOKENS.astype("<u2").tobytes())
    (tmp_path / "b.bin").write_bytes(TOKENS[:100].astype("<u2").tobytes())

    refuse(open_tokens, "has 202 bytes, which are no whole number of uint32: dtype", tmp_path / "a.bin", dtype="uint32")
    refuse(open_tokens, r"has the id \d+, but .* or vocab_size or dtype is wrong", tmp_path / "b.bin", dtype="uint32")
    file = write_megatron(tmp_path / "c")
    refuse(open_tokens, 'dtype = "uint16" has no effect: all files say what', file, dtype="uint16")


def test_files_that_are_cut_off_are_refused(tmp_path, open_tokens):
    def cut(file):
        file.write_bytes(file.read_bytes()[:-4])
        return file

    refuse(
        open_tokens, r"a\.bin is truncated: 101 tokens of uint16, as a\.idx has it", cut(write_megatron(tmp_path / "a"))
    )
    write_megatron(tmp_path / "b")
    refuse(open_tokens, r"b\.idx is truncated: 3 sequences take", cut(tmp_path / "b.idx"))
    refuse(open_tokens, r"c\.ds is truncated: 101 tokens", cut(write_datatrove(tmp_path / "c.ds")))
    folder = write_litdata(tmp_path / "d")
    cut(folder / "chunk-0-1.bin")
    refuse(open_tokens, r"chunk-0-1\.bin is truncated or no chunk of litdata: by its header it ends at \d+", folder)
    (folder / "chunk-0-1.bin").unlink()
    refuse(open_tokens, r"chunk-0-1\.bin is missing, which index\.json lists", folder)


def test_ids_beyond_the_vocabulary_are_refused_in_every_format(tmp_path, open_tokens):
    for path in (write_megatron(tmp_path / "a"), write_datatrove(tmp_path / "b.ds"), write_litdata(tmp_path / "c")):
        refuse(open_tokens, r"has the id \d+, but the vocabulary has 200", path, vocab_size=200)
        refuse(open_tokens, "does not say how large its vocabulary is; set vocab_size", path, vocab_size=None)


def test_what_is_no_row_of_ids_is_refused(tmp_path, open_tokens):
    write_megatron(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(40))
    refuse(open_tokens, "not an index of Megatron's", tmp_path / "a.bin")
    index = write_litdata(tmp_path / "b") / "index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"config": {"data_format": ["jpeg", "int"]}}))
    refuse(open_tokens, r"its chunks hold \['jpeg', 'int'\]", tmp_path / "b")
    index.write_text(json.dumps(content | {"config": {**content["config"], "compression": "zstd"}}))
    refuse(open_tokens, "its chunks are compressed", tmp_path / "b")
    write_megatron(tmp_path / "c")
    (tmp_path / "c.idx").write_bytes(
        (tmp_path / "c.idx").read_bytes().replace(struct.pack("<q", 60), struct.pack("<q", 64))
    )
    refuse(open_tokens, "its sequences do not follow each other", tmp_path / "c.bin")
