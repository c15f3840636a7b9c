"""What the distribution registers, as a configuration finds it."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from forge_core.config.builder import ComponentBuilder
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_data.config import RecordsConfig, TextFilesConfig, TokenFilesConfig


@pytest.fixture(scope="module")
def builder():
    return ComponentBuilder(discover(frozenset()))


def test_sources_are_chosen_by_name_with_one_path_or_several(builder):
    text = builder.resolve("data_source", {"name": "text_files", "path": "corpus", "exclude": ["**/tests/**"]})
    tokens = builder.resolve("data_source", {"name": "token_files", "path": ["a", "b/*.bin"], "validation": 0.01})

    assert (text.config.path, text.config.exclude) == ("corpus", ("**/tests/**",))
    assert text.config.tokenizer.qualified_name == "forge-plugins-data:bytes"
    assert (tokens.config.path, tokens.config.tokenizer) == (("a", "b/*.bin"), None)


def test_a_tokenizer_is_a_table_or_a_name(builder):
    table = {"name": "text_files", "path": "x", "tokenizer": {"name": "tokenizer_file", "path": "t.json"}}

    assert builder.resolve("data_source", table).config.tokenizer.config.path == "t.json"
    assert builder.resolve("data_source", {**table, "tokenizer": "bytes"}).config.tokenizer.name == "bytes"


def test_mistakes_are_named_with_their_key(builder):
    wrong = {"name": "text_files", "path": ["a", ""], "validation": 1.5, "encoding_errors": "ignore", "workers": -1}

    with pytest.raises(ConfigError) as caught:
        builder.resolve("data_source", wrong)

    with pytest.raises(ConfigError, match=r"path.*required"):
        builder.resolve("data_source", "token_files")
    assert "encoding_errors" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        builder.resolve("data_source", wrong | {"encoding_errors": "skip"})
    for key in ("path", "validation", "workers"):
        assert key in str(caught.value)


def test_a_source_built_from_a_table_reads_the_text(builder, tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    use = builder.resolve("data_source", {"name": "text_files", "path": str(tmp_path)})

    source = builder(use, seq_len=4, split="train")

    assert bytes(source.read(np.arange(len(source)))["tokens"].ravel().astype("u1")) == b"some tex"


def test_evaluation_without_data_is_found_by_validation_before_anything_runs():
    config = TokenFilesConfig(path="x")
    holding_out = TokenFilesConfig(path="x", validation=0.1)

    def problems(checked, data, own_data=None, interval=10):
        own = SimpleNamespace(config=own_data) if own_data is not None else None
        job = SimpleNamespace(data=SimpleNamespace(config=data), eval=SimpleNamespace(interval=interval, data=own))
        return [key for key, sentence in checked.check(job)]

    assert problems(config, data=config) == ["validation"]
    assert problems(config, data=config, interval=0) == []
    assert problems(holding_out, data=holding_out) == []
    other = TokenFilesConfig(path="other")
    assert problems(config, data=config, own_data=other) == []
    assert problems(other, data=config, own_data=other) == []
    assert problems(holding_out, data=config, own_data=holding_out) == ["validation"]


@pytest.mark.parametrize("config", [TextFilesConfig, RecordsConfig, TokenFilesConfig])
@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (("a", "b", "a"), "has 'a' twice; files are read once"),
        (("a", "b/../a"), "has 'a' and 'b/../a', which are the same; files are read once"),
        (("a", "b", "a/b"), None),
    ],
)
def test_two_paths_to_the_same_files_are_found_by_validation(config, paths, said):
    data = config(path=paths, tokenizer=None)
    job = SimpleNamespace(data=SimpleNamespace(config=data), eval=SimpleNamespace(interval=0, data=None))

    found = [*data.check(job)]

    assert [key for key, _ in found] == ["path"] * (said is not None)
    assert all(sentence.startswith(said) for _, sentence in found)


def test_an_end_of_documents_is_for_keeping_them_apart(builder):
    table = {"name": "token_files", "path": "a.npy", "vocab_size": 9, "end_of_document": 0}

    with pytest.raises(ConfigError, match="end_of_document: has no effect without document_mask = true"):
        builder.resolve("data_source", table)
    assert builder.resolve("data_source", {**table, "document_mask": True}).config.end_of_document == 0


def test_describing_and_configuring_import_neither_numpy_nor_torch():
    program = (
        "import sys, forge_plugins_data.plugin, forge_plugins_data.config\n"
        "print(sorted({'numpy', 'torch', 'pyarrow', 'tokenizers', 'rich'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_preparing_data_does_not_import_torch():
    program = "import sys, forge_plugins_data.commands; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
