"""What can be known before the first step is said before the first step, in a sentence, and leaves nothing behind."""

import os
import re
import sys

import pytest

from forge_core.checkpoint.manifest import FORMAT
from forge_core.cli import main
from forge_core.run.lease import Lease

OVERRIDES = {
    "unknown section": (["trian.steps=3"], "trian: unknown key; did you mean 'train'?"),
    "unknown key": (["optimizer.lrr=3"], "optimizer.lrr: unknown key; did you mean 'lr'?"),
    "more GiB than there are": (["model.dim=1000000000"], "model.dim: 1000000000 in 2 layers makes about 1.6e+19"),
    "a vocabulary of more GiB than there are": (
        [f"model.vocab_size={10**15}"],
        "model.vocab_size: 1000000000000000 in 2 layers makes about 3.2e+16",
    ),
    "heads of more GiB than there are": (
        [f"model.head_dim={10**14}", "model.n_kv_heads=4"],
        "model.head_dim: 400000000000000 in 2 layers",
    ),
    "more parameters than this machine can hold": (
        ["model.dim=131072", "model.feed_forward.hidden_dim=524288"],
        "model: the parameters of one rank take",
    ),
    "a tensor of more bytes than can be counted": (
        [f"model.num_experts={4 * 10**9}", f"model.moe.hidden_dim={10**9}", "model.moe.router=hash"],
        "model: a tensor of it is too large to be counted; make it smaller (Storage size calculation overflowed",
    ),
    "a size of more than 64 bits": (
        ["model.num_experts=4", "model.moe.shared_experts=4", f"model.moe.shared_hidden_dim={2**62}"],
        "Overflow when unpacking long long)\n",
    ),
    "a learning rate that fp32 does not have": (["optimizer.lr=1e300"], "optimizer.lr: must be at most 1e+30, got"),
    "a decay that turns signs": (["optimizer.weight_decay=1e300"], "optimizer.weight_decay: must be at most 1 / lr ="),
    "an eps that is 0 in fp32": (["optimizer.eps=1e-300"], "optimizer.eps: must be at least 1e-38, got 1e-300"),
    "more layers than can be": (["model.n_layers=10000000"], "model.n_layers: must be at most 10000, got 10000000"),
    "an integer beyond 64 bits": (["train.steps=9223372036854775808"], "expected an integer of at most 64 bits"),
    "an integer of many digits": (
        [f"train.steps={'9' * 400}"],
        "expected an integer of at most 64 bits, got one of 1330",
    ),
    "the first integer of 65 bits": (["train.seed=9223372036854775808"], "at most 64 bits, got one of 65"),
    "more batches read ahead than memory holds": (["data.prefetch=1000000000"], "data.prefetch: must be at most 65536"),
    "a timeout that no clock can hold": (
        ["checkpoint.timeout=1e308"],
        "checkpoint.timeout: must be at most 1000000000, got 1e+308",
    ),
    "steps that are waited for for ever": (["run.step_timeout=1e10"], "run.step_timeout: must be at most 1000000000"),
    "trackers that are waited for for ever": (["run.trackers_timeout=1e300"], "run.trackers_timeout: must be at most"),
    "ranks that are waited for for ever": (["run.first_step_timeout=1e13"], "run.first_step_timeout: must be at most"),
    "the home of a user that is not there": (
        ["data.path=~no-such-user/x"],
        "the path '~no-such-user/x' begins with a user whom this machine does not have",
    ),
    "a path that the system does not take": (["data.path=" + "x" * 300], "cannot be looked at: File name too long"),
    "a run in the home of a user that is not there": (
        ["run.dir=~no-such-user/x"],
        "the path '~no-such-user/x' begins with a user whom this machine does not have",
    ),
    "weights at a path that the system does not take": (
        ["checkpoint.load.path=" + "x" * 300],
        "File name too long",
    ),
    "a start at a path that the system does not take": (
        ["checkpoint.resume=" + "x" * 300],
        "and it cannot be looked at ([Errno 36] File name too long",
    ),
    "canonical correlations of more features than samples": (
        ['evaluations=[{name="representations", samples=32, metric="cca"}]'],
        "evaluations[0].samples: cca needs more than the 32 features of a site, got 32",
    ),
    "a comparison of fewer samples than it takes": (
        ['evaluations=[{name="representations", samples=3}]'],
        "evaluations[0].samples: cka needs at least 4, got 3",
    ),
    "an evaluation of autoencoders in a run of a decoder": (
        ['evaluations=[{name="autoencoder"}]'],
        "evaluations[0].name: measures autoencoders, such as the model topk_sae, and [data] is text_files; remove it",
    ),
    "questions that are not there": (
        ['evaluations=[{name="exact_match", path="none.jsonl", max_new_tokens=2}]'],
        "evaluations exact_match: path = 'none.jsonl' cannot be read as questions: No such file or directory",
    ),
    "a label that no file can have": (
        [f'evaluations=[{{name="perplexity", label="{"x" * 101}"}}]'],
        "evaluations[0].label: must be at most 100 letters",
    ),
    "more random features than memory holds": (
        ['callbacks=[{name="capture", features=1000000000}]'],
        "callbacks[0].features: must be at most 65536",
    ),
    "adapters of a rank beyond counting": (
        [f"parallel.passes.lora.rank={10**18}"],
        "parallel.passes.lora.rank: must be at most 65536",
    ),
    "a null character": (['run.dir="a\\u0000b"'], "run.dir: cannot hold a null character"),
    "an entry of an array that has none": (
        ["optimizer.groups.0.lr_scale=0.5"],
        "optimizer.groups: has no entries; '0' is not one of them",
    ),
    "no time limit": (["run.time_limit=0"], "run.time_limit: 0 is not a time limit"),
    "unknown component": (["model.name=transfomer"], "Did you mean 'transformer'?"),
    "one that is not written yet": (
        ['trackers=[{name="carrier_pigeon"}]'],
        "provides a tracker named 'carrier_pigeon'",
    ),
    "string for a number": (['optimizer.lr="fast"'], 'optimizer.lr: expected a number, got the string "fast"'),
    "float for an integer": (["train.steps=5.0"], "train.steps: expected an integer, got the float 5.0 (write 5)"),
    "a word for false": (['data.shuffle="false"'], "write false without quotes"),
    "nan": (["optimizer.lr=nan"], "optimizer.lr: expected a finite number"),
    "negative": (["optimizer.lr=-1"], "optimizer.lr: must be greater than 0, got -1"),
    "zero": (["train.batch_size=0"], "train.batch_size: must be greater than 0, got 0"),
    "heads that do not divide": (["model.n_heads=5"], "model.n_heads: must divide dim = 32, got 5"),
    "kv heads that do not divide": (["model.n_kv_heads=3"], "model.n_kv_heads: must divide n_heads = 4, got 3"),
    "a sequence too long": (["train.seq_len=128"], "64 is shorter than train.seq_len = 128"),
    "a flag": (["--train.steps"], "needs a value"),
    "an option of another name": (["--nprco", "2"], "--nprco 2: is neither an option nor a section"),
    "an axis that nothing serves": (
        ["--nproc", "2", "parallel.ep=2", 'plugins.disable=["forge-plugins-moe"]'],
        "no installed pass serves the axis 'ep'",
    ),
    "an evaluation without an interval": (["eval.batches=3"], "eval: has no interval"),
    "a seed that no generator takes": (["train.seed=99999999999999999999"], "train.seed"),
    "a kernel that this device does not have": (["model.attention=cudnn"], '"cudnn" needs CUDA'),
    "a name too long for a directory": (["run.name=" + "x" * 300], "run.name: has 300 bytes"),
    "more processes than the mesh uses": (["--nproc", "3", "parallel.dp_shard=2"], "ask for 2 ranks"),
    "no number of processes": (["--nproc", "some"], "--nproc: expected a positive number or auto"),
    "evaluation of nothing": (["data.validation=0.0", "eval.interval=5"], "nothing to evaluate"),
    "vocabulary too small": (["model.vocab_size=100"], "smaller than the data's vocabulary of 257"),
    "fewer samples than a step": (["train.batch_size=4000"], "fewer than the 4000 of one step"),
    "a device that is not there": (["run.device=mps"], "run.device: mps was asked for"),
    "a schedule longer than the run": (["scheduler.warmup_steps=20"], "scheduler.warmup_steps"),
    "a warm-up in tokens longer than the run": (
        ['scheduler={name="cosine", warmup_tokens=1280}'],
        "got 1280, which lasts 10 steps of 128 tokens",
    ),
    "a run name that is a path": (["run.name=../elsewhere"], "run.name"),
    "a pass kept out that is needed": (["train.precision=bf16", "parallel.passes.fsdp=false"], "fsdp"),
    "an evaluation that is to be shuffled": (
        ["eval.interval=5", 'eval.data={name = "text_files", path = "held-out", shuffle = true}'],
        "eval.data.shuffle: has no effect: an evaluation reads its data in order",
    ),
    "an evaluation that is to be read ahead": (
        ["eval.interval=5", 'eval.data={name = "text_files", path = "held-out", workers = 2, prefetch = 4}'],
        "2 problems",
    ),
    "reading ahead by nobody": (
        ["data.workers=0", "data.prefetch=4"],
        "data.prefetch: has no effect while data.workers = 0",
    ),
    "a seed for an order that is none": (
        ["data.shuffle=false", "train.data_seed=1"],
        "train.data_seed: has no effect while data.shuffle = false",
    ),
    "a group of parameters like any other": (
        ['optimizer.groups=[{pattern = "*.norm.weight"}]'],
        "optimizer.groups: the last group (pattern '*.norm.weight') has no effect",
    ),
}

PASSES = "parallel.passes"
ON_RANKS = {
    "a number of ranks that the degrees do not divide": (
        ["--nproc", "3", "parallel.tp=2"],
        "3 ranks cannot be divided by the degrees, which ask for a multiple of 2 (tp 2)",
    ),
    "degrees for more ranks": (
        ["--nproc", "2", "parallel.tp=2", "parallel.dp_shard=2"],
        "the degrees ask for 4 ranks (dp_shard 2 × tp 2), and there are 2; start 4 processes",
    ),
    "experts that borrow ranks that are not there": (
        ["--nproc", "2", "parallel.ep=3"],
        "parallel.ep = 3 must divide the 2 ranks that it borrows",
    ),
    "heads that tp does not divide": (
        ["--nproc", "3", "parallel.tp=3"],
        "model.n_heads: 4 heads cannot be shared out evenly to parallel.tp = 3 ranks",
    ),
    "key-value heads that tp does not divide": (
        ["--nproc", "4", "parallel.tp=4"],
        "model.n_kv_heads: 2 key-value heads cannot be shared out evenly to parallel.tp = 4 ranks",
    ),
    "fewer microbatches than stages": (
        ["--nproc", "2", "parallel.pp=2"],
        "train.grad_accumulation = 1 gives a step fewer microbatches than the pipeline has ranks; set it to at least 2",
    ),
    "passes that conflict": (
        ["--nproc", "2", f"{PASSES}.compile.whole_model=true"],
        "compile.whole_model: true cannot be combined with 'fsdp': it gathers and frees parameters between blocks",
    ),
    "more processes than a machine can serve": (["--nproc", "10000"], "--nproc: 10000 processes are more than the"),
    "more stages than layers": (
        ["--nproc", "4", "parallel.pp=4", "train.grad_accumulation=4"],
        "the model has 2 layers, and each of 4 stages needs at least one",
    ),
    "more stages than can be listed": (
        ["parallel.pp=1000000000000"],
        "the model has 2 layers, and each of 1000000000000 stages needs at least one; lower parallel.pp",
    ),
    "more stages a rank than layers": (
        ["--nproc", "2", "parallel.pp=2", "train.grad_accumulation=2", f"{PASSES}.pipeline.schedule=ZBVZeroBubble"],
        "the model has 2 layers, and each of 4 stages needs at least one",
    ),
    "expert parallelism without experts": (["--nproc", "2", "parallel.ep=2"], "has no experts; set parallel.ep = 1"),
    "a width that tp does not divide": (
        ["--nproc", "2", "parallel.tp=2", "model.feed_forward.hidden_dim=51"],
        "51 features cannot be shared out evenly to parallel.tp = 2 ranks",
    ),
    "a vocabulary that leaves a rank without rows": (
        ["--nproc", "2", "parallel.tp=2", "model.vocab_size=1"],
        "1 rows, cut into parallel.tp = 2 parts, leave a rank with none",
    ),
    "matrices that fsdp cannot share out once tp has cut them": (
        ["--nproc", "6", "parallel.tp=2", "parallel.dp_shard=3"],
        "a matrix of 32 × 32 (model.n_heads), cut into parallel.tp = 2 parts by rows, cannot be shared out",
    ),
    "fp8 that finds nothing to do": (
        ["--nproc", "2", f"{PASSES}.fp8.emulate=true"],
        "no linear layer of a block has at least 1024 input and output features on a rank",
    ),
    "a pass that conflicts with an axis": (
        ["--nproc", "2", "parallel.pp=2", "train.grad_accumulation=2", f"{PASSES}.fsdp.keep_gathered=true"],
        "fsdp.keep_gathered: true cannot be combined with parallel.pp = 2",
    ),
    "gradients in shards, in a pipeline": (
        ["--nproc", "2", "parallel.pp=2", "train.grad_accumulation=2", f"{PASSES}.fsdp.accumulate=sharded"],
        'fsdp.accumulate: "sharded" cannot be combined with parallel.pp = 2: a pipeline reduces gradients once a step',
    ),
    "a schedule by its first letters": (
        ["--nproc", "2", "parallel.pp=2", f"{PASSES}.pipeline.schedule=zbv"],
        "\"zbv\" is not allowed; did you mean 'ZBVZeroBubble'?",
    ),
    "a schedule in small letters": (
        ["--nproc", "2", "parallel.pp=2", f"{PASSES}.pipeline.schedule=1f1b"],
        "\"1f1b\" is not allowed; did you mean '1F1B'?",
    ),
    "a schedule of which there are two": (
        ["--nproc", "2", "parallel.pp=2", f"{PASSES}.pipeline.schedule=interleaved"],
        "\"interleaved\" is not allowed; did you mean 'Interleaved1F1B'?",
    ),
    "no mode of activation checkpointing": (
        ["--nproc", "2", f"{PASSES}.activation_checkpointing.mode=sel"],
        "\"sel\" is not allowed; did you mean 'selective'?",
    ),
    "no recipe of fp8": (
        ["--nproc", "2", f"{PASSES}.fp8.recipe=Row_wise"],
        "\"Row_wise\" is not allowed; did you mean 'rowwise'?",
    ),
    "a pass in capitals": (
        ["--nproc", "2", f"{PASSES}.FSDP=true"],
        "no installed plugin provides a parallel pass named 'FSDP'. Did you mean 'fsdp'?",
    ),
}


def _written(folder):
    """All that is there, but for the bytecode that Python may write when it imports."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.fixture
def refused(capfd):
    """Run the command in this process; gives back what it says on being refused."""

    def run(tiny, *arguments):
        before = _written(tiny.folder)

        code = main(["run", str(tiny.config), *arguments])

        said = capfd.readouterr().err
        assert code == 2, said
        assert "Traceback" not in said
        assert _written(tiny.folder) == before
        return said

    return run


@pytest.mark.parametrize("case", OVERRIDES)
def test_a_wrong_setting_is_refused_with_a_sentence(refused, tiny, case):
    overrides, sentence = OVERRIDES[case]

    assert sentence in refused(tiny, *overrides)


@pytest.mark.parametrize("case", ON_RANKS)
def test_a_wrong_layout_is_refused_before_any_process_is_started(refused, tiny, monkeypatch, case):
    monkeypatch.setattr("forge_core.launch.launch", lambda *_: pytest.fail("processes would have been started"))
    overrides, sentence = ON_RANKS[case]

    assert sentence in refused(tiny, *overrides)


def test_fp8_without_torchao_is_refused_before_any_process_is_started(refused, tiny, monkeypatch):
    monkeypatch.setattr("forge_core.launch.launch", lambda *_: pytest.fail("processes would have been started"))
    monkeypatch.setattr("forge_core.registry.catalog.is_importable", lambda name: name != "torchao")

    said = refused(tiny, "--nproc", "2", f"{PASSES}.fp8.emulate=true")

    assert "parallel pass 'fp8' of forge-plugins-parallel" in said
    assert "needs 'torchao', which cannot be imported" in said


def test_a_tracker_without_its_package_says_what_to_install(refused, tiny, monkeypatch):
    monkeypatch.setattr("forge_core.registry.catalog.is_importable", lambda name: name != "wandb")

    said = refused(tiny, 'trackers=[{name="wandb"}]')

    assert re.search(r"trackers\[0\].*: tracker 'wandb' of forge-plugins-monitor \S+ needs 'wandb', which cannot", said)
    assert "pip install 'forge-plugins-monitor[wandb]'" in said


PICTURES = {
    "acme_pictures/plugin.py": """
        from forge_core.api import Component, hookimpl

        @hookimpl
        def forge_data_sources():
            yield Component(
                name="pictures", summary="for a test", factory="acme_pictures.pictures:Pictures",
                config="acme_pictures.config:PicturesConfig",
            )

        @hookimpl
        def forge_models():
            yield Component(
                name="viewer", summary="for a test", factory="acme_pictures.viewer:Viewer",
                config="forge_plugins_dense.config:TransformerConfig",
            )
    """,
    "acme_pictures/viewer.py": """
        from forge_plugins_dense.transformer import Transformer

        class Viewer(Transformer):
            def forward(self, tokens, targets=None, loss=None, *, image):
                return super().forward(tokens, targets, loss)
    """,
    "acme_pictures/config.py": """
        import attrs

        from forge_core.contracts.data_source import DataSourceConfig

        @attrs.frozen(kw_only=True)
        class PicturesConfig(DataSourceConfig):
            entry: str = "image"
    """,
    "acme_pictures/pictures.py": """
        import numpy as np

        class Pictures:
            vocab_size, tokenizer, fingerprint = 32, None, "pictures"

            def __init__(self, config, /, *, seq_len, split, **_):
                self.seq_len, self.entry = seq_len, config.entry

            def __len__(self):
                return 100

            def read(self, indices):
                tokens = np.ones((len(indices), self.seq_len), dtype=np.int64)
                return {"tokens": tokens, "targets": tokens, self.entry: np.zeros((len(indices), 3, 8, 8))}
    """,
}


def test_data_that_the_model_does_not_take_are_refused(refused, tiny, make_distribution):
    make_distribution("acme-pictures", files=PICTURES)

    said = refused(tiny, 'data={name="pictures"}')

    assert "data: batches have the entry 'image', which the model forge-plugins-dense:transformer does not take" in said


def test_data_without_an_entry_that_the_model_needs_are_refused(refused, tiny, make_distribution):
    make_distribution("acme-pictures", files=PICTURES)

    said = refused(tiny, "model={name='viewer', dim=32, n_layers=2, n_heads=4, max_seq_len=64}")

    assert "data: the model acme-pictures:viewer needs the entry 'image' in batches, which have tokens, targets" in said


def test_an_entry_without_a_description_is_refused_where_sequences_are_cut(tiny, make_distribution, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(make_distribution("acme-pictures", files=PICTURES)))
    before = _written(tiny.folder)

    done = tiny.run("--nproc", "2", "parallel.cp=2", "data={name='pictures', entry='noise'}")

    assert done.returncode == 2, done.stderr
    assert done.stderr.count("parallel.cp: the data do not describe the entry 'noise' of their batches") == 1
    assert "Traceback" not in done.stderr
    assert _written(tiny.folder) == before


def test_everything_that_is_wrong_is_said_at_once_with_file_and_line(refused, tiny):
    tiny.config.write_text(
        tiny.config.read_text().replace("steps = 10", 'steps = "ten"').replace("dim = 32", "dmi = 32")
    )

    said = refused(tiny, "optimizer.lr=-1")

    assert re.search(r"tiny.toml:\d+: train.steps: expected an integer", said)
    assert re.search(r"tiny.toml:\d+: model.dmi: unknown key; did you mean 'dim'", said)
    assert "optimizer.lr: must be greater than 0" in said
    assert "3 problems" in said


def test_a_missing_file(refused, tiny):
    tiny.config.unlink()

    assert "there is no such file" in refused(tiny)


def test_a_file_that_is_not_toml_is_named_with_the_line(refused, tiny):
    tiny.config.write_text("[run]\nname = \n")

    assert "tiny.toml:2: not valid TOML" in refused(tiny)


def test_an_empty_corpus(refused, tiny):
    (tiny.folder / "empty").mkdir()

    assert "has no files" in refused(tiny, f"data.path={tiny.folder}/empty")


def test_a_directory_that_cannot_be_made(refused, tiny):
    (tiny.folder / "file").write_text("")

    assert "run.dir" in refused(tiny, f"run.dir={tiny.folder}/file")


@pytest.mark.skipif(sys.platform != "linux", reason="a place that not even root can write to: /proc")
def test_a_directory_that_cannot_be_written_to(refused, tiny):
    why = "cannot write" if os.geteuid() == 0 else "no permission to write in /proc"

    assert f"run.dir: {why}" in refused(tiny, "run.dir=/proc/nowhere")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.dim=64"], "model.dim: 32 -> 64"),
        (
            ["model.feed_forward.activation=gelu"],
            "activation.name: 'forge-plugins-dense:silu' -> 'forge-plugins-dense:gelu'",
        ),
        (["train.seq_len=16"], "train.seq_len: 32 -> 16"),
        (["train.seed=1"], "train.seed: 42 -> 1"),
        (["data.shuffle=false"], "data.shuffle"),
        (["train.steps=5"], "at step 10 already"),
    ],
)
def test_a_resume_that_cannot_be_honoured_names_the_keys(refused, resumable, overrides, key):
    assert key in refused(resumable, "train.steps=12", *overrides)


def test_a_resume_on_other_data_is_refused(refused, resumable, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("something else altogether " * 2000)
    (tmp_path / "other" / "b.txt").write_text("and more of it, held out " * 2000)

    said = refused(resumable, f"data.path={tmp_path}/other", "train.steps=12", "data.workers=3", "data.prefetch=7")

    assert "other data (these keys differ: data.path)" in said  # and none that changes no sample


@pytest.fixture(scope="module")
def resumable(shared_tiny):
    shared_tiny.completed()
    return shared_tiny


def test_checkpoints_that_cannot_be_read_are_not_taken_for_a_fresh_start(refused, tiny):
    tiny.completed()
    manifest = tiny.path() / "checkpoints" / "step_00000010" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"format": {FORMAT}', '"format": 99'))

    assert "it has format 99" in refused(tiny, "train.steps=12")


def test_a_second_process_in_the_same_run_is_refused(refused, tiny):
    lease = Lease(tiny.path(), print)
    try:
        assert f"another process is training in {tiny.path()}: process {os.getpid()} on" in refused(tiny)
    finally:
        lease.give_back()


def test_debug_shows_the_traceback(tiny):
    done = tiny.run("--debug", "train.steps=0")

    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_all_ranks_fail_together_and_say_it_once(tiny):
    done = tiny.run("--nproc", "2", "train.batch_size=4000")

    assert done.returncode == 2
    assert done.stderr.count("fewer than the 8000 of one step") == 1
    assert not (tiny.folder / "runs").exists()
    assert "Traceback" not in done.stderr


def test_fewer_layers_than_stages_are_refused_by_all_ranks_and_said_once(tiny):
    done = tiny.run("--nproc", "2", "parallel.pp=2", "train.grad_accumulation=2", "model.n_layers=1")

    assert done.returncode == 2, done.stderr
    assert done.stderr.count("the model has 1 layers, and each of 2 stages needs at least one; lower parallel.pp") == 1
    assert not (tiny.folder / "runs").exists()
    assert "Traceback" not in done.stderr
