"""``forge plan`` says what a run would find, without its memory, its ranks or its data."""

import importlib
import json
import platform
import re
import sys
from pathlib import Path

import attrs
import pytest

import fork_server
from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.job import load_job
from forge_core.registry.catalog import Catalog
from forge_core.registry.discovery import discover
from forge_plugins_plan.alternatives import alternatives
from forge_plugins_plan.report import flops_by_convention

ROOT = Path(__file__).resolve().parents[2]

JOB = """
[model]
name = "transformer"
dim = 64
n_layers = 4
n_heads = 4
max_seq_len = 64
[data]
name = "text_files"
path = "not-there"
[train]
steps = 10
seq_len = 64
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    return file


@pytest.fixture
def plan(config, capfd):
    """Run the command in this process; gives back its exit code, what it printed, and what it said on stderr."""

    def run(*arguments):
        code = main(["plan", str(config), *arguments])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def planned(plan):
    """The plan as data."""

    def run(*arguments):
        code, out, said = plan("--json", *arguments)
        assert code == 0, said
        return json.loads(out)

    return run


@pytest.fixture
def alone(monkeypatch):
    """The job is not compared with other ways to recompute, each of which is one more simulation."""
    monkeypatch.setattr("forge_plugins_plan.report.alternatives", lambda *job: iter(()))


BY_DAY = ("fsdp on two ranks", "large encoder, frozen")


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is in use is asked of glibc")
@pytest.mark.parametrize(("only", "jobs"), [(BY_DAY, 2), pytest.param((), 14, marks=pytest.mark.nightly)])
def test_predicted_peaks_are_within_five_percent_of_what_real_runs_take(monkeypatch, capfd, only, jobs):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("plan_memory")
    monkeypatch.setattr(benchmark.subprocess, "Popen", fork_server.Popen)
    monkeypatch.setattr(benchmark, "JOB", benchmark.JOB.replace("steps = 3", "steps = 2"))  # the second has the peak
    monkeypatch.setattr(sys, "argv", ["plan_memory.py", *(f"--only={job}" for job in only)])

    benchmark.main()

    said = capfd.readouterr().out
    errors = [float(text) for text in re.findall(r"([+-][\d.]+)%$", said, re.M)]
    assert len(errors) >= jobs, said
    assert max(map(abs, errors)) < 5, said


def test_gradients_of_microbatches_are_whole_or_in_shards(alone, planned):
    several = ("--world-size", "8", "--gpu", "h200", "train.grad_accumulation=4", "model.n_layers=2")
    plans = [planned(*several, f"parallel.passes.fsdp.accumulate={one}") for one in ("whole", "sharded", "auto")]

    whole, sharded, auto = (plan["stages"][0]["largest"]["temporary"] for plan in plans)
    assert whole - sharded > 0.5 * 4 * plans[0]["parameters"]
    assert auto == whole  # which is next to nothing on such a GPU


def test_products_by_groups_are_planned_for_a_gpu_that_has_a_kernel_for_them(alone, capfd):
    """Elsewhere the layers of text and of images see all positions, and more is kept for backward."""
    job = ROOT / "configs" / "vlm" / "mixture_of_transformers.toml"
    settings = "--json", "--world-size", "1", "data.tokenizer={name='bytes'}", "train.precision=bf16"
    kept = {}
    for gpu in ("h100", "a100-80"):
        assert main(["plan", str(job), *settings, "--gpu", gpu]) == 0
        kept[gpu] = json.loads(capfd.readouterr().out)["stages"][0]["largest"]["activations"]

    assert kept["a100-80"] > 1.2 * kept["h100"]


def test_the_step_of_an_optimizer_is_planned_as_a_gpu_makes_it(alone, planned):
    """Of many parameters at once; a CPU has one after the other."""
    settings = "optimizer={name='lion', lr=1e-3}", "model.dim=256", "train.seq_len=8", "train.batch_size=1"
    (cpu,), (gpu,) = (planned("--world-size", "1", *settings, *more)["stages"] for more in ((), ("--gpu", "h100")))

    assert gpu["largest"]["optimizer"] == cpu["largest"]["optimizer"]
    assert gpu["peak_bytes"] > cpu["peak_bytes"] + 0.8 * gpu["parameter_bytes"]


def test_a_mixture_has_the_vocabulary_of_its_sources(alone, planned):
    """It was asked for by --vocab-size."""
    made = "{name='a', weight=1, source={name='synthetic', vocab_size=300}}"
    text = "{name='b', weight=1, source={name='text_files', path='x'}}"

    plan = planned("--world-size", "1", f"data={{name='mixture', sources=[{made}, {text}]}}")

    assert plan["vocab_size"] == 300


def test_a_thousand_ranks_are_planned_in_one_process(alone, planned):
    plan = planned("--world-size", "1024", "parallel.dp_replicate=8", "--gpu", "h200")

    assert plan["mesh"]["dp_shard"] == 128
    assert plan["vocab_size"] == 257
    assert plan["tokens_per_step"] == 1024 * 2 * 64
    touched = ["blocks.* (4)", "embed", "head", "the model"]
    assert [(one["phase"], one["touched"]) for one in plan["passes"]] == [("fsdp", touched)]
    (stage,) = plan["stages"]
    assert sum(stage["at_peak"].values()) == stage["peak_bytes"]
    assert stage["parameter_bytes"] < plan["parameters"] * 4 / 64
    assert stage["largest"]["optimizer"] >= 2 * stage["parameter_bytes"]
    assert plan["fits"]


@pytest.mark.parametrize(
    ("optimizer", "most", "tables"),
    [
        ('{name="adafactor", lr=1e-3}', 0.1, 0),
        pytest.param(  # embeddings have 8 bytes a parameter
            *('{name="adamw_8bit", lr=1e-3, min_elements=0}', 1.0, 2 * 2**16),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_state_of_other_shapes_is_planned_with_the_bytes_that_it_has(alone, planned, optimizer, most, tables):
    (stage,) = planned("--world-size", "4", "parallel.tp=2", f"optimizer={optimizer}")["stages"]

    assert 0 < (stage["at_peak"]["optimizer"] - tables) / stage["parameter_bytes"] <= most


def test_what_a_step_of_the_optimizer_makes_for_a_while_is_not_its_state(alone, planned):
    """Where sequences are short, the most is there in that step."""
    short = ("--world-size", "1", "train.batch_size=1", "train.seq_len=8")
    (stage,) = planned(*short, "optimizer={name='adamw_8bit', lr=1e-3, min_elements=0}")["stages"]

    at_peak, largest = stage["at_peak"], stage["largest"]
    assert at_peak["gradients"] == stage["parameter_bytes"]
    assert at_peak["optimizer"] < stage["parameter_bytes"]
    assert at_peak["temporary"] > 2 * stage["parameter_bytes"]
    assert all(at_peak[name] <= most for name, most in largest.items())
    assert largest["temporary"] < 3 * stage["parameter_bytes"], "gradients are counted as such"


def test_an_embedding_is_not_whole_on_a_rank_while_the_logits_are(alone, planned):
    layout = ("--world-size", "64", "--vocab-size", "8192")
    (freed,) = planned(*layout)["stages"]
    (kept,) = planned(*layout, "parallel.passes.fsdp.reshard_after_forward=never")["stages"]

    table, block = 4 * 8192 * 64, 4 * (4 * 64 * 64 + 3 * 64 * 256)
    assert kept["at_peak"]["gathered"] - freed["at_peak"]["gathered"] >= table
    assert freed["at_peak"]["gathered"] < table + 4 * block


def test_recomputation_is_compared_by_what_the_pass_itself_would_do(planned):
    two = ("--world-size", "2", "model.n_layers=2")
    ways = {one["what"]: one for one in planned(*two)["recomputation"]}
    full = planned(*two, "parallel.passes.activation_checkpointing.mode=full")

    none, selective, all_blocks = ways.values()
    assert none["is_the_jobs"]
    assert none["activation_bytes"] > selective["activation_bytes"] > all_blocks["activation_bytes"] > 0
    assert all_blocks["peak_bytes"] == full["stages"][0]["peak_bytes"]
    assert [one["what"] for one in full["recomputation"] if one["is_the_jobs"]] == [all_blocks["what"]]


def test_a_way_to_recompute_that_is_not_among_the_compared_is_told_beside_them(planned):
    arguments = ("--world-size", "2", "model.n_layers=2", "parallel.passes.activation_checkpointing.every=2")

    *compared, own = planned(*arguments)["recomputation"]

    assert own["is_the_jobs"]
    assert own["what"] == "activation_checkpointing: every = 2"
    assert not any(one["is_the_jobs"] for one in compared)
    assert compared[-1]["activation_bytes"] < own["activation_bytes"] < compared[0]["activation_bytes"]


def test_what_waits_in_the_hosts_memory_is_told_as_no_time_counts_it(plan):
    pass_ = "parallel.passes.activation_checkpointing"
    arguments = ("--world-size", "2", "--gpu", "h100", "train.batch_size=64")

    kept = [plan(*arguments, f"{pass_}.mode={mode}")[1] for mode in ("offload", "full")]
    nothing, own = (
        float(re.search(rf"{way} +([\d.]+)", kept[0])[1]) for way in ("nothing", r'checkpointing: mode = "offload"')
    )

    told = re.search(r"\n  ([\d.]+) MiB per microbatch go to the host's memory and back, .* way ([\d.e-]+) to", kept[0])
    assert float(told[1]) == pytest.approx(nothing - own, rel=0.01)
    assert float(told[2]) == pytest.approx((nothing - own) * 2**20 / 50e9, rel=0.1)
    assert "host's memory" not in kept[1]


def test_any_installed_pass_can_offer_ways_to_recompute(config):
    catalog = _offering({"mode": "full", "every": 2}, {"mode": "auto"}, {"mode": "unheard-of"})
    overrides = ["parallel.pp=2", "train.grad_accumulation=2"]
    job = load_job(config, overrides, catalog=catalog, world_size=4)

    found = [one.what for one in alternatives(job, catalog, 4, ComponentBuilder(catalog))]

    # "auto" does not go with a pipeline, and what its own config refuses is left out
    assert found == ["nothing", 'activation_checkpointing: mode = "full", every = 2']


def test_the_text_says_how_many_ranks_share_out_experts(alone, plan):
    code, out, said = plan("--world-size", "2", "model.num_experts=4", "parallel.ep=2")

    assert code == 0, out + said
    assert "ranks  2: dp_shard 2, ep 2\n" in out


def test_experts_whose_routing_is_checked_are_planned_as_others(alone, planned):
    arguments = ["--world-size", "1", "model.num_experts=4"]

    checked = planned(*arguments, "model.moe.check_routing=true")

    assert checked["stages"] == planned(*arguments)["stages"]


def test_the_text_names_passes_stages_and_whether_it_fits(plan):
    code, out, said = plan("--world-size", "4", "parallel.pp=2", "train.grad_accumulation=4", "--gpu", "h100")

    assert code == 0, out + said
    assert "ranks  4: pp 2, dp_shard 2" in out
    assert re.search(r"split +forge-plugins-parallel:pipeline: 3 modules: embed, blocks\.\* \(2\)", out)
    assert re.search(r"pp 1: rank 2 +[\d.]+ +[\d.]+\n", out)
    assert re.search(r'activation_checkpointing: mode = "full" +[\d.]+ +[\d.]+\n', out)
    assert re.search(r"nothing +[\d.]+ +[\d.]+  \(this job\)\n", out)
    assert re.search(r"Fits: .* h100 has 78.1 GiB", out)
    assert not re.search(r" $", out, re.M)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--world-size", "8", "parallel.pp=8", "train.grad_accumulation=8"], "the model has 4 layers"),
        (["--world-size", "8", "parallel.dp_shard=3"], "ask for 3 ranks"),
        (["--world-size", "8", "parallel.tp=8"], "4 heads cannot be shared out evenly to parallel.tp = 8 ranks"),
        (["--world-size", "1", "--gpu", "h20"], "Did you mean h200?"),
        (["--world-size", "1", "--gpu", "a100"], "Did you mean a100-40 or a100-80?"),
        (["--world-size", "1", "data.name=token_files", "data.path=x"], "say --vocab-size N, or set model.vocab_size"),
        (
            ["--world-size", "1", "--vocab-size", "999", "model.vocab_size=256"],
            "--vocab-size 999 has no effect: model.vocab_size is 256",
        ),
        (
            ["--world-size", "6", "parallel.ep=2", "model.num_experts=4", "model.moe={hidden_dim=16}"],
            "model.moe: a stack of 4 × 16 × 64, of which parallel.ep = 2 ranks have other experts, cannot be shared",
        ),
        (
            ["--world-size", "6", "parallel.ep=2", "model.num_experts=4", "model.moe={hidden_dim=48, bias=true}"],
            "blocks.0.feed_forward.experts.down_bias, of the shape (4, 64), cut into 2 × 1 parts by",
        ),
        (
            ["--world-size", "2", "parallel.passes.fsdp.cpu_offload=true"],
            "a step of rank 0 cannot be simulated: parameters and optimizer are in the host's memory",
        ),
        (  # neither this pipeline stage nor the other trains a norm
            [
                *("--world-size", "2", "parallel.pp=2", "train.grad_accumulation=2", "parallel.passes.lora.rank=2"),
                'optimizer.groups=[{pattern="*norm*", lr_scale=0.5}]',
            ],
            "optimizer.groups: the pattern '*norm*' matches no parameter",
        ),
    ],
)
def test_what_a_run_would_refuse_and_what_cannot_be_told_is_said(plan, arguments, sentence):
    code, _, said = plan(*arguments)

    assert code == 2
    assert sentence in said


AUTO = "parallel.passes.activation_checkpointing.mode=auto"


def test_what_is_recomputed_can_depend_on_the_gpu_that_is_planned_for(alone, plan, planned, monkeypatch):
    small = attrs.evolve(_gpu("h100"), memory_gib=1 + 0.0075)
    roomy = planned("--world-size", "1", AUTO, "--gpu", "h100")
    monkeypatch.setattr("forge_plugins_plan.gpus.gpu_named", lambda _: small)
    tight = planned("--world-size", "1", AUTO, "--gpu", "small")
    code, _, said = plan("--world-size", "1", AUTO)

    assert roomy["passes"][0]["touched"] == ["the model"], "nothing to recompute"
    assert tight["passes"][0]["touched"][0].startswith("blocks.")
    assert code == 2
    assert "a plan is told by --gpu" in said


@pytest.mark.parametrize(
    ("settings", "of_parameter"),
    [((), 4), (("optimizer.rounding=split",), 10), (("optimizer.rounding=split", "optimizer.moments=bf16"), 6)],
)
def test_what_split_weights_take_is_the_optimizers(alone, planned, settings, of_parameter):
    stage = planned("--world-size", "1", "train.precision=bf16_pure", *settings)["stages"][0]

    counts = 4 * 100  # of steps, one a parameter
    assert 0 <= stage["largest"]["optimizer"] - of_parameter * stage["parameter_bytes"] / 2 < counts


FLOAT8 = ("--world-size", "2", "train.precision=bf16", "parallel.passes.fp8.min_dim=16")


def test_norms_keep_on_a_gpu_their_input_and_a_number_a_row(alone, planned):
    """What a CPU keeps beside it: the input in fp32, and what it divides that by. Measured on an H200: RESULTS.md."""
    on = ("--world-size", "1", "train.precision=bf16_pure")
    of_cpu, of_gpu = (planned(*on, *gpu)["stages"][0]["largest"]["activations"] for gpu in ((), ("--gpu", "h200")))
    norms, tokens, dim = 2 * 4 + 1, 2 * 64, 64

    assert of_cpu - of_gpu > norms * tokens * dim * 4


@pytest.mark.nightly  # by day, the next one plans with it
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_is_planned_for_a_gpu_that_has_it(alone, planned, recipe):
    pytest.importorskip("torchao")

    plan = planned(*FLOAT8, f"parallel.passes.fp8.recipe={recipe}", "--gpu", "h100")

    assert [(one["phase"], one["modules"]) for one in plan["passes"]] == [("swap", 28), ("fsdp", 7)]
    assert plan["flops_per_token"] == planned("--world-size", "2")["flops_per_token"]


def test_float8_gathered_by_fsdp_halves_what_is_gathered_of_blocks(alone, planned):
    pytest.importorskip("torchao")

    gathered = [
        planned(
            *FLOAT8, "model.vocab_size=32", "model.n_layers=2", f"parallel.passes.fp8.all_gather={on}", "--gpu", "h100"
        )["stages"][0]
        for on in ("false", "true")
    ]

    bf16, float8 = (stage["at_peak"]["gathered"] for stage in gathered)
    assert 0.4 < float8 / bf16 < 0.7, (bf16, float8)


@pytest.mark.parametrize(("gpu", "which"), [(["--gpu", "a100-80"], "a100-80"), ([], "cpu")])
def test_float8_is_refused_where_it_is_not(plan, gpu, which):
    pytest.importorskip("torchao")

    code, _, said = plan(*FLOAT8, *gpu)

    assert code == 2
    assert f"parallel.passes.fp8: {which} does not multiply in float8" in said


@pytest.mark.parametrize(("tied", "table"), [(False, 6 * 128_256 * 4096), (True, 0)])
def test_flops_in_three_conventions(tmp_path, tied, table):
    """Against the arithmetic for a Llama of 8 billion parameters: 51.470, 54.622 and 48.249 GFLOP a token."""
    config = tmp_path / "job.toml"
    model = f'extends = "{ROOT}/configs/model/llama_7b.toml"\n'
    config.write_text(model + JOB.partition("[data]")[1] + JOB.partition("[data]")[2])
    catalog = discover()
    overrides = ["train.seq_len=4096", f"model.tie_embeddings={str(tied).lower()}"]
    job = load_job(config, overrides, catalog=catalog, world_size=1)

    flops = flops_by_convention(job, 128_256, ComponentBuilder(catalog))

    assert flops["standard"] == pytest.approx(51.470e9, rel=1e-4)
    assert flops["with_embedding"] == flops["standard"] + table
    assert flops["causal"] == pytest.approx(48.249e9, rel=1e-4)


def _offering(*compared):
    """What is installed, with other settings of the one pass that offers any."""
    plugins = []
    for plugin in discover().plugins:
        components = [
            (kind, attrs.evolve(one, compared=compared) if getattr(one, "compared", ()) else one)
            for kind, one in plugin.components
        ]
        plugins.append(attrs.evolve(plugin, components=tuple(components)))
    return Catalog(plugins)


def _gpu(name):
    from forge_plugins_plan.gpus import gpu_named

    return gpu_named(name)


SHAPE = ("model.dim=64", "model.n_layers=4", "model.n_heads=4", "model.max_seq_len=64")
PICTURES = {
    "acme_pictures/plugin.py": """
        from forge_core.api import Component, hookimpl

        @hookimpl
        def forge_data_sources():
            yield Component(
                name="pictures", summary="for a test", factory="acme_pictures.viewer:never_called",
                config="acme_pictures.config:PicturesConfig",
            )

        @hookimpl
        def forge_models():
            yield Component(
                name="viewer", summary="for a test", factory="acme_pictures.viewer:Viewer",
                config="forge_plugins_dense.config:TransformerConfig",
            )
    """,
    "acme_pictures/config.py": """
        import attrs

        from forge_core.contracts.batch import Entry
        from forge_core.contracts.data_source import DataSourceConfig

        @attrs.frozen(kw_only=True)
        class PicturesConfig(DataSourceConfig):
            "Keys of ``pictures``."

            height: int = 0
            "0 differs from batch to batch."

            def entries(self):
                dims = ("sample", "channel", "height")
                return {"image": Entry(dims=dims, sizes=(None, 3, self.height or None), dtype="float32")}
    """,
    "acme_pictures/viewer.py": """
        from forge_plugins_dense.transformer import Transformer

        def never_called(config, /, **_):
            raise AssertionError("a plan opens no data")

        class Viewer(Transformer):
            def forward(self, tokens, image, targets=None, loss=None, **inputs):
                return super().forward(tokens, targets, loss, **inputs)
    """,
}


def test_batches_have_what_the_data_describe(alone, plan, planned, make_distribution):
    make_distribution("acme-pictures", files=PICTURES)
    viewer = ("--world-size", "2", "--vocab-size", "257", "model.name=viewer", *SHAPE)

    def peak(height):
        pictures = f'data={{name="pictures", height={height}}}'
        return planned(*viewer, pictures)["stages"][0]["peak_bytes"]

    assert peak(1001) - peak(1) == 2 * 3 * 1000 * 4  # of two samples, fp32

    code, _, said = plan(*viewer, 'data={name="pictures"}')
    assert code == 2
    assert "how large the dimension 'height' of the entry 'image' is cannot be known without the data" in said
    code, _, said = plan("--world-size", "2", "--vocab-size", "257", 'data={name="pictures", height=8}')
    assert code == 2
    assert "batches have the entry 'image', which the model forge-plugins-dense:transformer does not take" in said
