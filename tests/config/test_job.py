"""From a file to a job: what is accepted, what it becomes, and every way to get it wrong."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from forge_core.config.problems import ConfigProblems
from forge_core.errors import ConfigError
from forge_core.job import components, deprecations, dump_job, job_table, load_job, notes
from forge_core.registry.catalog import Catalog
from forge_core.registry.discovery import discover

GOOD = """\
[model]
name = "decoder"
dim = 64
[data]
name = "text"
path = "corpus"
[train]
steps = 10
seq_len = 128
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
"""


def test_a_configuration_becomes_a_typed_job(load):
    job = load()

    assert job.model.qualified_name == "standard:decoder"
    assert job.model.config.dim == 64
    assert job.data.config.path == Path("corpus")
    assert job.optimizer.config.betas == (0.9, 0.95)
    assert job.scheduler.name == "constant"
    assert job.loss.name == "cross_entropy"
    assert job.model.config.feed_forward.name == "mlp"
    assert job.data.config.tokenizer.name == "bytes"


def test_a_derived_default_follows_what_was_given(load):
    assert load("model.n_heads=4").model.config.n_kv_heads == 4
    assert load("model.n_heads=4", "model.n_kv_heads=2").model.config.n_kv_heads == 2


def test_nested_components_resolve_at_any_depth(load):
    job = load('model.feed_forward={name = "moe", router = {name = "acme-routers:topk", k = 3}}')

    assert job.model.config.feed_forward.config.router.provider == "acme-routers"
    assert job.model.config.feed_forward.config.router.config.k == 3
    assert ("model", "feed_forward", "router") in [path for path, _ in components(job)]


RICH = """\
[run]
name = "a-run"
[model]
name = "decoder"
dim = 64
window = 32
feed_forward = {name = "moe", n_experts = 4, router = "hash"}
[model.scaling]
factor = 2
[data]
name = "text"
path = "~/corpus"
weights = {b = 1, a = 0.1}
suffixes = ["py", "c"]
mode = "exact"
files = ["x", "y"]
[train]
steps = 10
seq_len = 128
precision = "fp32"
global_batch_size = 32
[optimizer]
name = "muon"
lr = 0.3333333333333333
[parallel.passes]
compile = true
fsdp = {reshard = false}
[[callbacks]]
name = "progress"
[[callbacks]]
name = "progress"
interval = 3
[eval]
interval = 5
data = {name = "text", path = "held-out"}
"""


@pytest.mark.parametrize("world_size", [None, 1, 2])
def test_the_dumped_job_loads_as_an_equal_job_and_gives_the_same_bytes(load, world_size):
    job = load(text=RICH, world_size=world_size)

    text = dump_job(job)
    again = load(text=text, world_size=world_size)

    assert again == job
    assert dump_job(again) == text
    assert tomllib.loads(text) == job_table(job)


def test_a_dumped_job_keeps_its_global_batch_on_another_number_of_ranks(load):
    job = load("train.batch_size=2", "train.global_batch_size=8", world_size=1)

    again = load(text=dump_job(job), world_size=4)

    assert job.train.grad_accumulation == 4
    assert (again.train.grad_accumulation, again.train.global_batch_size) == (1, 8)


def test_an_evaluation_without_an_interval_is_refused_and_one_that_is_switched_off_is_not(complaint, load):
    assert "eval: has no interval" in complaint("eval.batches=3")
    assert load("eval.batches=3", "eval.interval=0").eval.batches == 3


def test_none_survives_a_round_trip_by_being_absent(load):
    job = load("parallel.passes.compile=false")

    table = job_table(job)

    assert "window" not in table["model"]
    assert "grad_accumulation" in table["train"]
    assert table["parallel"]["passes"] == {"compile": False}
    assert load(text=dump_job(job)) == job


def test_equal_jobs_are_equal_texts_whatever_order_they_were_written_in(load):
    one = load("parallel.passes.fsdp=true", "parallel.passes.compile=true")
    other = load("parallel.passes.compile=true", "parallel.passes.fsdp=true")

    assert dump_job(one) == dump_job(other)


def test_the_dump_does_not_depend_on_the_hash_seed(write, tmp_path):
    write('x = "y"')
    script = "from forge_core.config.unstructure import plain; print(plain(frozenset({'a', 'b', 'c', 'd'})))"
    texts = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "123"
    }

    assert len(texts) == 1


def test_dumped_components_are_qualified_and_paths_are_as_written(load):
    table = job_table(load(text=RICH))

    assert table["model"]["feed_forward"]["router"] == {"name": "forge-moe:hash"}
    assert table["data"]["path"] == "~/corpus"
    assert table["data"]["suffixes"] == ["c", "py"]


# -- run.name and batches


def test_the_run_is_named_after_the_file_unless_it_says_otherwise(write, catalog):
    assert load_job(write(name="configs/tiny.toml"), catalog=catalog).run.name == "tiny"
    assert load_job(write(name="configs/tiny.toml"), ["run.name=big"], catalog=catalog).run.name == "big"


@pytest.mark.parametrize("name", ["a/b", "..", "", "a\\b", " a", "a\nb"])
def test_a_run_name_is_a_plain_file_name(complaint, name):
    assert "run.name: must be a plain file name" in complaint(f"run.name={name}")


def test_a_run_name_that_is_too_long_for_a_directory_is_refused(complaint, load):
    """In bytes: ä has two."""
    assert "run.name: has 202 bytes, which are too many for a directory's name" in complaint(f"run.name={'ä' * 101}")
    assert load(f"run.name={'ä' * 100}").run.name == "ä" * 100


@pytest.mark.parametrize(
    ("settings", "world_size", "accumulation", "total"),
    [
        ([], None, 1, None),
        ([], 4, 1, None),
        (["train.grad_accumulation=3"], 2, 3, None),
        (["train.global_batch_size=64"], None, None, 64),
        (["train.global_batch_size=64"], 1, 8, 64),
        (["train.global_batch_size=64"], 4, 2, 64),
        (["train.global_batch_size=64", "train.grad_accumulation=2"], 4, 2, 64),
        (["train.global_batch_size=64", "parallel.dp_replicate=2"], 4, 2, 64),
    ],
)
def test_accumulation_follows_from_a_global_batch_size_that_is_asked_for(
    load, settings, world_size, accumulation, total
):
    train = load(*settings, world_size=world_size).train

    assert (train.grad_accumulation, train.global_batch_size) == (accumulation, total)


def test_contradictory_batch_sizes_are_refused(complaint):
    message = complaint("train.global_batch_size=64", "train.grad_accumulation=3", world_size=2)

    assert "train.global_batch_size: 64 is not" in message
    assert "8 × 2 × 3 = 48" in message


def test_a_global_batch_that_cannot_be_shared_out_is_refused(complaint):
    message = complaint("train.global_batch_size=20", world_size=2)

    assert "must be a multiple of batch_size × data-parallel ranks = 8 × 2 = 16, got 20" in message


def test_a_global_batch_that_no_number_of_ranks_could_share_is_refused_without_a_world_size(complaint, load):
    message = complaint("train.global_batch_size=20", "parallel.dp_shard=-1", world_size=None)

    assert "train.global_batch_size: must be a multiple of batch_size = 8, for any number of ranks, got 20" in message
    assert load("train.global_batch_size=24", "parallel.dp_shard=-1", world_size=None).train.grad_accumulation is None


# -- passes and checks of components


def test_a_needed_pass_is_added_and_the_result_reloads(load):
    job = load(world_size=4)

    assert job.parallel.passes["fsdp"].qualified_name == "standard:fsdp"
    assert load(text=dump_job(job), world_size=4) == job


def test_a_degree_that_nothing_serves_is_refused_at_the_key_that_asks_for_it(complaint):
    message = complaint("--parallel.tp=2")

    assert message.startswith("--parallel.tp=2: parallel.tp = 2: no installed pass serves the axis 'tp'")


def test_degrees_that_do_not_fit_the_world_are_refused(complaint):
    assert "6 ranks" in complaint("parallel.dp_shard=6", world_size=4)


def test_the_checks_of_components_at_any_depth_are_reported_under_their_keys(complaint):
    message = complaint(
        "train.seq_len=4096",
        'model.feed_forward={name = "moe", n_experts = 3, router = "hash"}',
        "parallel.ep=2",
    )

    assert "model.max_seq_len: 1024 is shorter than train.seq_len = 4096" in message
    assert "model.feed_forward.n_experts: 3 experts cannot be shared out to parallel.ep = 2 ranks" in message


def test_a_check_that_crashes_is_named_as_its_plugins_bug(complaint):
    message = complaint('callbacks=["crashing"]')

    assert "callbacks[0]: the check of callback 'standard:crashing' fails (KeyError: 'oops')" in message
    assert "This is a bug in standard." in message


def test_keys_may_be_called_as_the_methods_of_a_config_class(load, catalog):
    job = load('callbacks=[{name = "reviewed", check = false, notes = "draft", expand = 2}]')

    assert notes(job, catalog) == []
    assert job_table(job)["callbacks"] == [{"name": "standard:reviewed", "check": False, "notes": "draft", "expand": 2}]


def test_a_key_that_would_be_lost_beside_the_name_of_the_component_is_its_plugins_bug(complaint):
    message = complaint('callbacks=["named"]')

    assert "has a field 'name', the key that chooses the component. This is a bug in standard." in message


def test_deprecated_components_are_noted(load, catalog):
    job = load("optimizer.name=adam-w", "optimizer.lr=1")

    assert deprecations(job, catalog) == ["optimizer: 'adam-w' of standard 1.0 is deprecated: use 'adamw'"]


# -- [plugins]


def test_the_catalog_is_found_without_what_the_job_disables(write, catalog):
    asked = []

    def discover(disable) -> Catalog:
        asked.append(tuple(disable))
        return catalog

    load_job(write(), ['plugins.disable=["acme-routers"]'], catalog=discover)

    assert asked == [("acme-routers",)]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('plugins.require=["click>=999"]', "asks for click>=999, and click "),
        ('plugins.require=["no-such-thing"]', "no-such-thing is not installed: pip install 'no-such-thing'"),
        ('plugins.require=["click ~ 1"]', "is not a requirement such as"),
    ],
)
def test_what_the_job_demands_of_plugins_is_checked(complaint, setting, message):
    assert message in complaint(setting)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("acme-router", "did you mean 'acme-routers'?"),
        ("routers", "did you mean 'acme-routers'?"),
        ("x", "installed: acme"),
    ],
)
def test_a_plugin_to_leave_out_that_is_not_there_is_an_error(write, catalog, name, hint):
    with pytest.raises(ConfigError, match=re.escape(f"no plugin of that name is installed; {hint}")):
        load_job(write(), [f'plugins.disable=["{name}"]'], catalog=lambda disable: catalog)


FACTORIES = {
    "acme/plugin.py": """
        from forge_core.api import Component, hookimpl

        @hookimpl
        def forge_schedulers():
            factories = {"defined": "parts:Cosine", "made": "parts:made", "imported": "parts:dumps", "lazy": "lazy:any",
                         "other_name": "parts:Kosine", "other_module": "part:Cosine", "unreadable": "bad:Cosine"}
            for name, factory in factories.items():
                yield Component(name=name, summary="s", factory=f"acme.{factory}", config="acme.config:Empty")
            yield Component(name="other_package", summary="s", factory="acne.parts:Cosine", config="acme.config:Empty")
    """,
    "acme/config.py": """
        import attrs

        @attrs.frozen
        class Empty:
            pass
    """,
    "acme/parts.py": """
        raise AssertionError("it is read, and not imported")

        if True:
            from json import dumps
        made = other = None
        class Cosine: ...
    """,
    "acme/lazy.py": "def __getattr__(name): ...",
    "acme/bad.py": "import (",
}


def test_a_factory_that_is_not_where_its_description_says_is_found_without_importing_it(
    write, catalog, make_distribution
):
    make_distribution("acme", "1.2", files=FACTORIES)
    installed = Catalog([*catalog.plugins, *(one for one in discover().plugins if one.distribution == "acme")])

    def problem(name: str) -> str:
        try:
            load_job(write(), [f"scheduler={{name='{name}'}}"], catalog=installed)
        except ConfigError as error:
            return str(error)
        return ""

    assert [problem(name) for name in ("defined", "made", "imported", "lazy")] == [""] * 4
    for name, factory, why in (
        ("other_name", "acme.parts:Kosine", "there is no Kosine in acme.parts. Did you mean 'Cosine'?"),
        ("other_module", "acme.part:Cosine", "there is no module 'acme.part'. Did you mean 'parts'?"),
        ("other_package", "acne.parts:Cosine", "there is no package 'acne'."),
        ("unreadable", "acme.bad:Cosine", "bad.py, line 1: invalid syntax."),
    ):
        said = f"scheduler: the factory of scheduler '{name}' of acme 1.2, '{factory}': {why} This is a bug in acme."
        assert said in problem(name)


def test_met_requirements_and_plugins_that_are_not_here_are_fine(load):
    load('plugins.require=["click>=8,<9", "attrs"]', 'plugins.disable=["something-else"]')


# -- bad input

BAD = [
    # unknown names
    ("[trian]\nsteps = 1", "trian: unknown key; did you mean 'train'?"),
    ("[data.tokenizr]", "data.tokenizr: unknown key; did you mean 'tokenizer'?"),
    ("train.stepz = 1", "train.stepz: unknown key; did you mean 'steps'?"),
    ("train.zzz = 1", "train.zzz: unknown key; known keys: steps, seq_len,"),
    ("loss = {name = 'cross_entropy', x = 1}", "loss.x: unknown key; it takes no keys"),
    ("optimizer.name = 'adamww'", "optimizer: no installed plugin provides an optimizer named 'adamww'. Did you mean"),
    ("optimizer.name = 'adamww'", "lost 0.1 did not load (ModuleNotFoundError: No module 'x')"),
    ("model.name = 'muon'", "model: 'muon' names an optimizer; this key needs a model."),
    ("model.feed_forward = {name = 'moe', router = 'topk'}", "is provided by 2 plugins. Say which one:\n"),
    ("model.feed_forward = {name = 'moe', router = 'topk'}", '    name = "acme-routers:topk"    # the topk'),
    ("model.feed_forward = {name = 'moe'}", 'model.feed_forward.router: is required: name = "..." naming a router'),
    ("parallel.passes.fsdpp = true", "parallel.passes.fsdpp: no installed plugin provides a parallel pass named"),
    # types
    ("train.steps = '12'", 'train.steps: expected an integer, got the string "12"'),
    ("train.steps = 1000.0", "train.steps: expected an integer, got the float 1000.0 (write 1000)"),
    ("train.steps = 2.5", "train.steps: expected an integer, got the float 2.5"),
    ("train.steps = true", "train.steps: expected an integer, got true"),
    ("model.tie_embeddings = 'false'", 'expected true or false, got the string "false" (write false without quotes)'),
    ("model.tie_embeddings = 1", "model.tie_embeddings: expected true or false, got the integer 1"),
    ("optimizer.lr = '1e-3'", 'optimizer.lr: expected a number, got the string "1e-3"'),
    ("optimizer.lr = true", "optimizer.lr: expected a number, got true"),
    ("optimizer.lr = nan", "optimizer.lr: expected a finite number, got the float nan"),
    ("optimizer.lr = inf", "optimizer.lr: expected a finite number, got the float inf"),
    (f"optimizer.lr = 1{'0' * 400}", "optimizer.lr: expected a finite number"),
    ("data.path = 123", "data.path: expected a string (a path), got the integer 123"),
    ("data.path = ''", "data.path: expected a path, got the empty string"),
    ("data.pattern = 2024-01-02", "data.pattern: expected a string, got the date 2024-01-02"),
    ("data.pattern = ['*']", "data.pattern: expected a string, got an array of 1"),
    ("data.files = 3", "data.files: expected a string or array of strings, got the integer 3"),
    ("data.files = ['a', 3]", "data.files[1]: expected a string, got the integer 3"),
    ("data.weights = {a = 'x'}", 'data.weights.a: expected a number, got the string "x"'),
    ("data.weights = []", "data.weights: expected a table, got an empty array"),
    ("data.suffixes = ['a', 'a']", "data.suffixes: an entry is there twice"),
    (
        "data.mode = 'fastt'",
        "data.mode: the string \"fastt\" is not allowed; did you mean 'fast'? Choose one of: 'fast',",
    ),
    ("optimizer.state = 'fp16'", "not allowed; did you mean 'bf16'? Choose one of: 'fp32', 'bf16'."),
    ("optimizer.state = 32", "optimizer.state: the integer 32 is not allowed. Choose one of: 'fp32', 'bf16'."),
    ("optimizer.betas = [0.9]", "optimizer.betas: expected an array of 2, got an array of 1"),
    ("optimizer.betas = '09'", 'optimizer.betas: expected an array, got the string "09"'),
    ("optimizer.betas = [0.9, 'x']", 'optimizer.betas[1]: expected a number, got the string "x"'),
    ("optimizer.groups = [{lr_scale = 1}]", "optimizer.groups[0].pattern: is required (a string)"),
    ("model.scaling = [1]", "model.scaling: expected a table, got an array of 1"),
    ("model.feed_forward = 3", 'model.feed_forward: expected a table with name = "..." naming a feed forward'),
    ("parallel.passes.fsdp = 'x'", "parallel.passes.fsdp: no installed plugin provides a parallel pass named 'x'"),
    ("parallel.passes.fsdp = 3", "parallel.passes.fsdp: expected a table with name"),
    ("callbacks = {name = 'progress'}", "callbacks: expected an array, got a table"),
    ("callbacks = [{name = 3}]", "callbacks[0].name: expected a string, got the integer 3"),
    ("callbacks = [{}]", 'callbacks[0]: needs name = "..." naming a callback; available: crashing, named'),
    # ranges
    ("train.steps = 0", "train.steps: must be greater than 0, got 0"),
    ("train.clip_norm = -1", "train.clip_norm: must be at least 0, got -1.0"),
    ("optimizer.lr = -1.0", "optimizer.lr: must be greater than 0, got -1.0"),
    ("optimizer.lr = 0", "optimizer.lr: must be greater than 0, got 0.0"),
    ("optimizer.betas = [0.9, 1.0]", "optimizer.betas[1]: must be less than 1, got 1.0"),
    ("optimizer.groups = [{pattern = ''}]", 'optimizer.groups[0].pattern: must not be empty, got ""'),
    ("parallel.dp_shard = 0", "parallel.dp_shard: must be -1 or greater than 0, got 0"),
    ("model.window = 0", "model.window: must be greater than 0, got 0"),
    ("model.scaling = {factor = 1}", "model.scaling.factor: must be greater than 1, got 1.0"),
    ("model.n_heads = 5", "model.n_heads: must divide dim = 64, got 5"),
    ("model.n_kv_heads = 3", "model.n_kv_heads: must divide n_heads = 8, got 3"),
    ("callbacks = [{name = 'progress', title = 'much too long'}]", "must have a length of at most 8, got"),
    ("callbacks = [{name = 'progress', title = 'A'}]", "must match the regular expression '[a-z]+', got \"A\""),
    # plugins' own mistakes
    (
        "model.feed_forward = {name = 'moe', router = 'gone'}",
        "model.feed_forward.router: acme-routers 2.0: cannot import the config class of router 'gone'",
    ),
    (
        "model.feed_forward = {name = 'moe', router = 'gone'}",
        "(AttributeError: module 'forge_core.errors' has no attribute 'Gone'). This is a bug in acme-routers",
    ),
    ("model.feed_forward = {name = 'moe', router = 'not_a_class'}", "is not an attrs class. This is a bug in acme-"),
    (
        "model.feed_forward = {name = 'moe', router = 'unresolvable'}",
        "name 'Unknown' is not defined). This is a bug in",
    ),
    (
        "model.feed_forward = {name = 'moe', router = 'unwritable'}",
        "UnwritableConfig' fails (TypeError: 1j cannot be written in TOML). This is a bug in acme-routers",
    ),
    (
        "model.feed_forward = {name = 'moe', router = 'gap'}",
        "GapConfig' fails (TypeError: (None, 3) cannot be written in TOML)",
    ),
    (
        "model.feed_forward = {name = 'moe', router = 'numbered'}",
        "NumberedConfig' fails (TypeError: {1: 'one'} cannot be written in TOML)",
    ),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[f"{line[:48]}" for line, _ in BAD])
def test_bad_input_is_told_with_its_place_and_its_remedy(complaint, line, message):
    text = _replace(GOOD_LINES, line)

    complained = complaint(text=text)

    assert message in complained
    key = line.removeprefix("[").partition(" ")[0].partition("]")[0]
    where = 1 + next(number for number, one in enumerate(text.splitlines()) if one.lstrip("[").startswith(key))
    assert complained.startswith(f"job.toml:{where}: ")


GOOD_LINES = """\
model.name = "decoder"
model.dim = 64
data.name = "text"
data.path = "corpus"
train.steps = 10
train.seq_len = 128
train.precision = "fp32"
optimizer.name = "adamw"
optimizer.lr = 1e-3
"""


def _replace(text: str, line: str) -> str:
    """``text`` with ``line`` in the place of the one that sets the same key, or added."""
    key = line.partition(" = ")[0]
    kept = [one for one in text.splitlines() if one.partition(" = ")[0] != key]
    return "\n".join([*kept, line]) + "\n"


def test_everything_is_reported_at_once_in_the_order_of_the_lines(complaint):
    text = """\
[model]
name = "decoder"
dim = "64"
widht = 3
[data]
name = "text"
paht = "x"
[train]
steps = 1000.0
seq_len = 0
[optimizer]
name = "adamww"
[[callbacks]]
name = "progress"
[[callbacks]]
name = "progress"
interval = 2.5
"""
    problems = complaint(text=text).splitlines()

    assert [problem.split(": ")[0] for problem in problems] == [
        "job.toml:3",
        "job.toml:4",
        "job.toml:7",
        "job.toml:9",
        "job.toml:12",
        "note",  # about a plugin that did not load, which may be why the optimizer is not there
        "job.toml:17",
        "6 problems in job.toml",
    ]


def test_a_misspelt_required_key_is_one_problem(complaint):
    assert (
        complaint(text=GOOD.replace("dim = 64", "din = 64"))
        == "job.toml:3: model.din: unknown key; did you mean 'dim'?"
    )


def test_missing_sections_and_keys_say_what_belongs_there(complaint):
    message = complaint(text='[model]\nname = "decoder"\n')

    assert "job.toml:1: model.dim: is required (an integer)" in message
    assert "job.toml: train: is required (a table)" in message
    assert (
        'job.toml: optimizer: is required: name = "..." naming an optimizer; available: adam-w, adamw, muon' in message
    )


def test_one_problem_has_no_closing_count(complaint):
    assert complaint("train.steps=0") == "train.steps=0: train.steps: must be greater than 0, got 0"


def test_problems_can_be_read_by_programs(load):
    with pytest.raises(ConfigProblems) as caught:
        load("train.steps=0", "train.seq_len=0")

    assert [problem.path for problem in caught.value.problems] == [("train", "steps"), ("train", "seq_len")]
    assert isinstance(caught.value, ConfigError)


def test_an_error_found_by_building_on_bad_values_does_not_hide_them(complaint):
    """n_kv_heads is compared with n_heads = 0 by a modulo, which would raise."""
    message = complaint("model.n_heads=0", "model.n_kv_heads=2")

    assert message.startswith("model.n_heads=0: model.n_heads: must be greater than 0, got 0")
    assert "ZeroDivisionError" not in message
