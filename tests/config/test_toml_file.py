"""Reading TOML files on top of each other, and remembering where everything was written."""

from __future__ import annotations

import os
import random
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest
import tomli_w

from forge_core.config import toml_file
from forge_core.config.problems import ConfigProblems, Location, Problem
from forge_core.config.toml_file import read_document
from forge_core.config.toml_positions import key_lines
from forge_core.config.toml_text import toml_tokens
from forge_core.errors import ConfigError


def test_layers_are_merged_table_by_table_and_arrays_are_replaced(write):
    write("[train]\nsteps = 1\nseq_len = 8\n[x]\nlist = [1, 2]\n", "base.toml")
    path = write('extends = "base.toml"\n[train]\nsteps = 2\n[x]\nlist = [3]\n')

    document = read_document(path)

    assert document.table == {"train": {"steps": 2, "seq_len": 8}, "x": {"list": [3]}}
    assert str(document.locate(("train", "steps"))) == "job.toml:3"
    assert str(document.locate(("train", "seq_len"))) == "base.toml:3"


def test_later_files_of_an_array_win_and_names_are_relative_to_the_file(write):
    write("a = 1\nb = 1\n", "shared/one.toml")
    write('extends = "one.toml"\nb = 2\n', "shared/two.toml")
    write("b = 3\n", "three.toml")
    path = write('extends = ["shared/two.toml", "three.toml"]\n')

    document = read_document(path)

    assert document.table == {"a": 1, "b": 3}
    assert str(document.locate(("a",))) == str(Path("shared/one.toml")) + ":1"


def test_a_layer_that_chooses_another_component_drops_the_keys_of_the_first(write):
    write('[optimizer]\nname = "adamw"\nlr = 1\nbetas = [0.9, 0.95]\n', "base.toml")
    path = write('extends = "base.toml"\n[optimizer]\nname = "muon"\nmomentum = 0.9\n')

    document = read_document(path)

    assert document.table == {"optimizer": {"name": "muon", "momentum": 0.9}}
    assert ("optimizer", "lr") not in document.locations


@pytest.mark.parametrize("name", ["adamw", "standard:adamw"])
def test_a_layer_that_names_the_same_component_keeps_its_keys(write, name):
    write('[optimizer]\nname = "adamw"\nlr = 1\n', "base.toml")
    path = write(f'extends = "base.toml"\n[optimizer]\nname = "{name}"\neps = 2\n')

    assert read_document(path).table == {"optimizer": {"name": name, "lr": 1, "eps": 2}}


def test_providers_of_the_same_name_are_different_components(write):
    write('[optimizer]\nname = "a:adamw"\nlr = 1\n', "base.toml")
    path = write('extends = "base.toml"\n[optimizer]\nname = "b:adamw"\n')

    assert read_document(path).table == {"optimizer": {"name": "b:adamw"}}


def test_a_bare_name_is_the_table_with_that_name(write):
    write('optimizer = "adamw"\nloss = {name = "x", a = 1}\n', "base.toml")
    path = write('extends = "base.toml"\nloss = "y"\n[optimizer]\nlr = 1\n')

    assert read_document(path).table == {"optimizer": {"name": "adamw", "lr": 1}, "loss": {"name": "y"}}


def test_a_run_is_not_called_by_the_name_of_a_file_that_it_extends(write):
    write('[run]\nname = "demo"\ndir = "d"\n', "base.toml")
    write('extends = "base.toml"\n', "between.toml")

    document = read_document(write('extends = "between.toml"\n'))

    assert document.table == {"run": {"dir": "d"}}
    assert ("run", "name") not in document.locations


def test_a_run_of_another_name_keeps_its_other_keys(write):
    write('[run]\nname = "a"\ndir = "d"\n', "base.toml")
    path = write('extends = "base.toml"\n[run]\nname = "b"\n')

    assert read_document(path).table == {"run": {"name": "b", "dir": "d"}}


def test_a_file_takes_back_keys_and_tables_of_the_files_that_it_extends(write):
    write('[train]\nsteps = 1\nseq_len = 8\n[eval]\ninterval = 5\n[eval.data]\npath = "x"\n', "base.toml")
    path = write('extends = "base.toml"\nunset = ["train.steps", "eval"]\n[eval]\nsamples = 3\n')

    document = read_document(path)

    assert document.table == {"train": {"seq_len": 8}, "eval": {"samples": 3}}
    assert ("eval", "data", "path") not in document.locations
    assert read_document(Path("base.toml")).table["train"]["steps"] == 1


def test_two_files_may_share_a_base(write):
    write("a = 1\n", "base.toml")
    write('extends = "base.toml"\n', "one.toml")
    write('extends = "base.toml"\n', "two.toml")

    assert read_document(write('extends = ["one.toml", "two.toml"]')).table == {"a": 1}


def test_keys_of_other_files_are_not_taken_for_misspelt_ones(write):
    """``setup`` of a cluster.toml is no ``unset``."""
    assert read_document(write('setup = ["x"]\ntext = "y"')).table == {"setup": ["x"], "text": "y"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('a = 1\nextends = "nope.toml"', "job.toml:2: extends: there is no file nope.toml"),
        ("extends = 3", "job.toml:1: extends: expected a file name or an array of file names"),
        ('extend = "base.toml"', "job.toml:1: extend: unknown key; did you mean 'extends'?"),
        ('unsett = ["train.steps"]', "job.toml:1: unsett: unknown key; did you mean 'unset'?"),
        ('extends = "job.toml"', "the files extend each other in a circle: job.toml extends job.toml"),
        ('extends = "./other.toml"', "in a circle: job.toml extends other.toml extends job.toml"),
        ('unset = "a"', "job.toml:1: unset: expected an array of keys, as in unset = ["),
        ('extends = "abc.toml"\nunset = ["x.abd"]', "job.toml:2: unset: 'x.abd' is not set; did you mean 'x.abc'?"),
        ('extends = "abc.toml"\nunset = ["x.abc.d"]', "job.toml:2: unset: 'x.abc.d' is not set"),
        ('extends = "abc.toml"\nunset = ["x y"]', "job.toml:2: unset: 'x y' is not a key; keys are words joined by"),
        ("a = 1\nb = = 2", "job.toml:2: not valid TOML: invalid value (column 5)"),
        ("a = 1\na = 2", "job.toml:2: not valid TOML: cannot overwrite a value"),
        ("a = [1,\n\n", "job.toml:2: not valid TOML: "),
        (f"a = {'1' * 5000}", "job.toml:1: not valid TOML: exceeds the limit"),
    ],
)
def test_files_that_cannot_be_used_are_refused_with_the_line(write, text, message):
    write('extends = "job.toml"', "other.toml")
    write("x.abc = 1", "abc.toml")

    with pytest.raises(ConfigError) as caught:
        read_document(write(text))

    assert message in str(caught.value)


def test_missing_files_directories_and_other_encodings_are_refused(write, tmp_path):
    with pytest.raises(ConfigError, match=r"^nope\.toml: there is no such file; the working directory is /"):
        read_document(Path("nope.toml"))
    with pytest.raises(ConfigError, match="this is a directory; name a TOML file"):
        read_document(tmp_path)
    with pytest.raises(ConfigError, match="the configuration file comes first"):
        read_document(Path("--train.steps=3"))
    path = write()
    path.write_bytes(b"a = 1\nb = '\xff'\n")
    with pytest.raises(ConfigError, match=r"^job\.toml:2: the file is not UTF-8 text"):
        read_document(path)


def test_keys_are_found_in_every_way_that_toml_can_write_them():
    text = '''\
# comment = 0
a.b = 1 # [not.a.table]
"quo.ted" . 'key' = 2
[table]
text = """
[no.table]
key = "no key"
"""
raw = \'\'\'
x = 1\'\'\'
[ "spaced" . out ]
list = [ 1,
  2, # ] }
  { x = 1, y = { z = [ "}" ] } },
]
[[array]]
name = "one"
[array.sub]
deep = 07:32:00.9
[[array]]

name = "two" # "
[[array.inner]]
v = 1
[[array.inner]]
v = 2
'''
    tomllib.loads(text)

    lines = key_lines(toml_tokens(text))

    assert lines["a", "b"] == 2
    assert lines["quo.ted", "key"] == 3
    assert lines["table",] == 4
    assert lines["table", "raw"] == 9
    assert ("no",) not in lines
    assert lines["spaced", "out"] == 11
    assert [lines["spaced", "out", "list", index] for index in range(3)] == [12, 13, 14]
    assert lines["spaced", "out", "list", 2, "y", "z"] == 14
    assert lines["array", 0, "name"] == 17
    assert lines["array", 0, "sub", "deep"] == 19
    assert (
        lines[
            "array",
            1,
        ]
        == 20
    )
    assert lines["array", 1, "name"] == 22
    assert lines["array", 1, "inner", 1, "v"] == 26


@pytest.mark.parametrize("seed", range(20))
def test_every_key_of_any_document_is_found_on_a_line_that_has_it(seed):
    rng = random.Random(seed)
    table = _random_table(rng, depth=3)
    text = tomli_w.dumps(table, multiline_strings=True)
    written = text.splitlines()

    lines = key_lines(toml_tokens(text))

    for path in _paths(table, ()):
        assert path in lines
        if isinstance(path[-1], str):
            assert path[-1] in written[lines[path] - 1]
    assert lines.keys() <= set(_paths(table, ()))


def _random_table(rng: random.Random, depth: int) -> dict[str, object]:
    return {f"{rng.choice(['k', 'a.b', 'ä', 'x y', '-'])}{index}": _random_value(rng, depth) for index in range(4)}


def _random_value(rng: random.Random, depth: int) -> object:
    scalars = [1, -2.5, True, "q\"'#[", "two\nlines = [1]\n[x]\n", "", "\\", '"""', "ends in quotes\n''\"\""]
    kind = rng.randrange(4) if depth else 0
    if kind == 1:
        return _random_table(rng, depth - 1)
    if kind == 2:
        return [_random_table(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 3:
        return [_random_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return rng.choice(scalars)


def _paths(value: object, path: tuple[str | int, ...]):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _paths(item, (*path, key))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 100_000, "job.toml:1: not valid TOML: it is nested more than 64 deep"),
        ("\na = " + "{b = " * 50_000, "job.toml:2: not valid TOML: it is nested more than 64 deep"),
        (".".join("a" * 50_000) + " = 1", "it is nested more than 64 deep"),
        ("[" + ".".join("a" * 50_000) + "]", "it is nested more than 64 deep"),
        ("".join(f"[t{i}]\n" for i in range(100_000)), "it has more than 200,000 names, values and signs"),
        ('"\\' * 500_000, "job.toml:1: not valid TOML"),
        (f'a = "{"x" * 2**20}"', "job.toml: cannot be read (it has more than 1 MiB, the most that is read)"),
    ],
)
def test_toml_that_would_take_minutes_or_all_stack_is_refused_with_the_bound(write, text, message):
    with pytest.raises(ConfigError) as caught:
        read_document(write(text))

    assert message in str(caught.value)


def test_many_tables_and_files_that_are_extended_on_many_ways_are_read_once(write, monkeypatch):
    monkeypatch.setattr("forge_core.config.toml_file._parse", counted := Mock(wraps=toml_file._parse))
    write("a = 1\n", "0.toml")
    for i in range(1, 24):
        write(f'extends = ["{i - 1}.toml", "./{i - 1}.toml"]\nb{i} = {i}\n', f"{i}.toml")

    assert len(read_document(Path("23.toml")).table) == 24
    assert counted.call_count == 24
    assert len(read_document(write("".join(f"[t{i}]\n" for i in range(5000)))).table) == 5000


def test_the_number_of_files_of_one_configuration_is_bounded(write):
    for i in range(40):
        write(f'extends = "{i + 1}.toml"\n', f"{i}.toml")

    with pytest.raises(ConfigError, match=r"31\.toml:1: extends: 32\.toml would be one file more than 32, the most"):
        read_document(Path("0.toml"))


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")

    for path in (tmp_path / "pipe.toml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"cannot be read \(it is a pipe, a socket or a device, not a file"):
            read_document(path)
    with pytest.raises(ConfigError, match="is no name of a file"):
        read_document(Path("a\0b"))


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbfa = 1\n")

    assert read_document(tmp_path / "job.toml").table == {"a": 1}


def test_of_many_problems_twenty_are_told_and_the_others_counted():
    problems = [Problem((f"key{i}",), "unknown key", location=Location("job.toml", i)) for i in range(3000)]

    lines = str(ConfigProblems(problems)).splitlines()

    assert lines[0] == "job.toml:0: key0: unknown key"
    assert len(lines) == 21
    assert lines[-1] == "3000 problems in the configuration; the first 20 are shown"
