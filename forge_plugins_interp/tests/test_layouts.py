"""What is seen of a model, what a change does, and what a store has, is the same in every layout."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist

import forge_plugins_interp as interp
from forge_core.errors import ConfigError
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_interp.autoencoders.config import TopKConfig, TranscoderConfig
from forge_plugins_interp.autoencoders.dictionary import Dictionary
from forge_plugins_interp.autoencoders.splice import Splice
from forge_plugins_interp.extraction import Request, extract
from forge_plugins_interp.interventions import WholeIntervention
from forge_plugins_interp.lenses.logit_lens import logit_lens
from forge_plugins_interp.patching.metric import metric_named
from forge_plugins_interp.patching.prompts import Prompts
from forge_plugins_interp.patching.sweep import sweep
from forge_plugins_interp.reduction import Reduction
from forge_plugins_interp.session import Session, initial_session
from forge_plugins_interp.store import Store
from forge_testing.several_ranks import on_ranks

DENSE = """
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
max_seq_len = 64
vocab_size = 40
qk_norm = true
init_std = 0.2
[data]
name = "text_files"
path = "unused"
[train]
steps = 4
seq_len = 16
batch_size = 2
grad_accumulation = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
[scheduler]
name = "constant"
[parallel]
dp_shard = 1
"""
MOE = DENSE.replace(
    "[data]",
    """[model.feed_forward]
name = "moe"
n_experts = 4
shared_experts = 1
router = { name = "softmax_topk", top_k = 2 }
[data]""",
)
MODELS = {"dense": DENSE, "moe": MOE}
TWO = {
    "fsdp2": ["parallel.dp_shard=2"],
    "tp2": ["parallel.tp=2"],
    "tp2 without sp": ["parallel.tp=2", "parallel.passes.tensor_parallel.sequence_parallel=false"],
    "cp2": ["parallel.cp=2"],
    "pp2": ["parallel.pp=2"],
    "recomputation": ["parallel.dp_shard=2", 'parallel.passes.activation_checkpointing.mode="full"'],
    "ep2": ["parallel.dp_shard=2", "parallel.ep=2"],
}
FOUR = {
    "hsdp2x2": ["parallel.dp_replicate=2", "parallel.dp_shard=2"],
    "tp2 cp2": ["parallel.tp=2", "parallel.cp=2"],
    "tp2 fsdp2": ["parallel.tp=2", "parallel.dp_shard=2"],
    "pp2 tp2": ["parallel.pp=2", "parallel.tp=2"],
    "pp2 cp2": ["parallel.pp=2", "parallel.cp=2"],
}
OF_EXPERTS = {
    "ep4 by nodes": [
        "parallel.dp_shard=4",
        "parallel.ep=4",
        "parallel.passes.expert_parallel.dispatcher.name=hierarchical",
        "parallel.passes.expert_parallel.dispatcher.ranks_per_node=2",
        "parallel.passes.expert_parallel.overlap=true",
    ],
}
PATTERNS = ("*", "blocks.*.*")
MODULES = {
    "dense": (
        "blocks.*.attention.o",
        "blocks.*.attention.o.input",
        "blocks.*.attention.core",
        "blocks.*.feed_forward.up",
    ),
    "moe": ("blocks.*.attention.o", "blocks.*.feed_forward.experts", "blocks.*.feed_forward.shared.down.input"),
}
"""By name."""
TOKENS = torch.randint(0, 40, (3, 16), generator=torch.Generator().manual_seed(1))
"""Three rows, so that two ranks along ``tp`` share the middle one."""

Values = dict[str, torch.Tensor]


def session(model: str, settings: list[str], world_size: int) -> Session:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(MODELS[model])
        job = load_job(path, settings, catalog=discover(), world_size=world_size)
    return initial_session(job, discover(), 40, torch.device("cpu"))


def changes(model: str) -> list[WholeIntervention]:
    """One of each kind of site: heads, neurons, the residual stream, pattern, and all of a width."""
    generator = torch.Generator().manual_seed(2)
    features = {"neuron": [0, 5, 70]} if model == "dense" else {"width": [0, 5, 30]}
    scaled = "blocks.1.mlp_post" if model == "dense" else "blocks.1.shared_out"
    of_experts = [interp.Scale("blocks.0.expert_out", factor=-2.0, at={"choice": 1, "position": [3, 12]})]
    return [
        *(of_experts if model == "moe" else []),
        interp.Zero("blocks.0.z", at={"head": [1, 3], "position": -1}),
        interp.Scale(scaled, factor=-2.0, at=features),
        interp.Add("blocks.0.resid_post", value=torch.randn(32, generator=generator), at={"position": [3, 12]}),
        interp.Project("blocks.1.resid_pre", directions=torch.randn(3, 32, generator=generator)),
        interp.Mean("blocks.1.attn_pattern", at={"head": 0}),
        interp.Resample("blocks.1.q_rot", seed=1),
        interp.Scale("blocks.0.attention.o", factor=-2.0, at={"position": [3, 12], "features": [0, 5]}),
    ]


def measured(model: str, settings: list[str], world_size: int) -> dict[str, Values | None]:
    """Values, gradients, and logits after each change; on ranks without the last stage of a pipeline, no logits."""
    one = session(model, settings, world_size)
    has_gradients = one.context.mesh.degrees["pp"] == 1
    with one.observe(*PATTERNS) as seen, torch.no_grad():
        one.model(TOKENS)
    found: dict[str, Values | None] = {"values": dict(seen), "gradients": None, "of unnamed": of_unnamed(one)}
    with one.observe(*MODULES[model], gradients=has_gradients) as modules, torch.set_grad_enabled(has_gradients):
        logits = one.model(TOKENS)
        if has_gradients:
            logits.square().sum().backward()
    found["modules"] = dict(modules)
    if has_gradients:
        found["modules"] |= {f"gradient of {name}": modules.grad(name) for name in modules}
    if has_gradients:
        with one.observe("blocks.*.*", "final_norm", gradients=True) as differentiated:
            logits = one.model(TOKENS)
            (logits[0, -1, 3] + logits[1, 5, 7].square() + logits[:, 9, 2].sum()).backward()
        found["gradients"] = {
            name: differentiated.grad(name)
            for name in differentiated
            if not name.rpartition(".")[2].startswith(
                ("attn_scores", "attn_pattern", "attn_head_out", "rout", "expert_out")
            )
        }
    of_changes = {}
    named = {f"{number} {change.kind}": change for number, change in enumerate(changes(model))}
    for name, change in {**named, **splices()}.items():
        with one.intervene(change), torch.no_grad():
            logits = one.model(TOKENS)
        if logits is not None:
            of_changes[name] = logits
    itself = [interp.Patch("blocks.*.resid_mid", source=seen)]
    itself += [interp.Patch("blocks.*.expert_out", source=seen)] if model == "moe" else []
    with one.intervene(*itself), torch.no_grad():
        logits = one.model(TOKENS)
    if logits is not None:
        of_changes["patched with itself"] = logits
    with torch.no_grad():
        logits = one.model(TOKENS)
    if logits is not None:
        of_changes["nothing"] = logits
    found["changes"] = of_changes
    read = logit_lens(one, TOKENS, ["embed", "blocks.*.resid_post"])
    found["lens"] = {name: logits for name, logits in read.items() if logits is not None}
    found["effects"] = effects(one) if has_gradients else None
    if not has_gradients:
        refused_in_a_pipeline(one)
    found["store"] = stored(one)
    return found


class Samples:
    """Five samples, which no number of ranks divides."""

    fingerprint = "samples"
    tokens = torch.randint(0, 40, (5, 16), generator=torch.Generator().manual_seed(3)).numpy()

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"tokens": self.tokens[indices], "targets": self.tokens[indices]}


def stored(one: Session) -> Values:
    """The store that the ranks write together."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    folder = Path(str(box[0]))
    patterns = ["*", *(f"blocks.*.{name}" for name in ("resid_post", "z", "attn_pattern", "mlp_out"))]
    request = Request(out=folder / "acts", sites=patterns, reduction=Reduction(), shard_samples=2)
    extract(one, Samples(), request, lambda line: None)
    found: Values = {}
    if dist.get_rank() == 0:
        store = Store(folder / "acts")
        found = {site: store.array(site) for site in store.sites}
        found["tokens of samples"] = torch.stack([store.tokens(sample) for sample in range(len(store))])
        found["ids"] = torch.from_numpy(store.ids)
        shutil.rmtree(folder)
    return found


def of_unnamed(one: Session) -> Values:
    """The value of a module of which no layout of heads says how it lies; of tensor parallelism, none."""
    if one.context.mesh.degrees["tp"] > 1:
        with pytest.raises(
            ConfigError, match=r"the pass tensor_parallel does not say .*; open it with parallel\.tp = 1"
        ):
            one.sites.chosen(["blocks.*.attention.q_norm"])
        return {}
    with one.observe("blocks.*.attention.q_norm") as seen, torch.no_grad():
        one.model(TOKENS)
    return dict(seen)


def refused_in_a_pipeline(one: Session) -> None:
    """A value of the other stage is not here, and the error says where it is; gradients are nowhere. Changes
    of such sites are among ``changes``: all ranks ask for one together, and the stage that has the site makes it."""
    mesh = one.context.mesh
    own = mesh.device_mesh.get_local_rank("pp")
    theirs = f"blocks.{1 - own}"
    with one.observe("blocks.*.resid_post", "blocks.*.attention.o") as seen, torch.no_grad():
        one.model(TOKENS)
    for name in (f"{theirs}.resid_post", f"{theirs}.attention.o", f"{theirs}.hook_resid_post"):
        with pytest.raises(ConfigError, match=rf"another pipeline stage has it, that of rank {1 - own} along pp"):
            seen[name]
    assert f"blocks.{own}.resid_post" in seen
    with (
        pytest.raises(ConfigError, match=r"gradients: a pipeline gives none .* with parallel\.pp=1"),
        one.observe("blocks.*.resid_post", gradients=True),
    ):
        pass


def splices() -> dict[str, Splice]:
    """An autoencoder in the place of a site, and a transcoder in the place of a layer."""
    found = {}
    for config in (
        TopKConfig(width=32, latents=64, k=4),
        TranscoderConfig(width=32, latents=64, k=4, target_width=32, skip=True),
    ):
        dictionary = Dictionary(config).eval()
        with torch.no_grad():
            for number, tensor in enumerate((*dictionary.parameters(), *dictionary.buffers())):
                tensor.normal_(generator=torch.Generator().manual_seed(number))
            dictionary.scales.copy_(torch.tensor([2.0, 3.0]))
        if dictionary.predicts():
            made = Splice("blocks.1.mlp_out", dictionary=dictionary, reads="blocks.1.mlp_in")
            found |= {"transcoded": made, "steered in a layer": attrs.evolve(made, values={7: 3.0}, error=True)}
        else:
            made = Splice("blocks.0.resid_post", dictionary=dictionary)
            found |= {"spliced": made, "spliced in part": attrs.evolve(made, at={"position": [2, -1]})}
            found["steered"] = attrs.evolve(made, values={3: 5.0, 40: 0.0}, factors={9: -2.0}, error=True)
            found["spliced with its error"] = attrs.evolve(made, error=True)
    return found


def effects(one: Session) -> Values:
    """Of patching by each method."""
    clean, corrupt = TOKENS[:1], TOKENS[1:2]
    with torch.no_grad():
        logits = one.model(clean)
    prompts = Prompts(clean, corrupt, metric_named("logit_diff", logits, [3, 7]))
    found: Values = {}
    for method in ("patching", "attribution", "integrated_gradients"):
        rows = sweep(one, prompts, ["blocks.0.z", "blocks.0.attn_pattern", "blocks.1.attn_out"], method=method)
        found[method] = torch.tensor([row["effect"] for row in rows])
    of_tokens = interp.Scale("blocks.0.attn_out", factor=-2.0, tokens=TOKENS[0, [3, 9]].tolist())
    with torch.no_grad(), one.intervene(of_tokens):
        found["tokens"] = one.model(TOKENS)
    return found


class InLayouts:
    def dense_on_two(self) -> dict[str, dict]:
        found = in_layouts("dense", TWO, ["recomputation", "tp2 without sp", "cp2", "pp2"])
        compiled = session("dense", ["parallel.dp_shard=2", "parallel.passes.compile={}"], 2)
        return {**found, "compiled": {"store": stored(compiled)}}

    def moe_on_two(self) -> dict[str, dict]:
        return in_layouts("moe", TWO, ["tp2", "ep2"])

    def dense_on_four(self) -> dict[str, dict]:
        return in_layouts("dense", FOUR, ["tp2 cp2"])

    def moe_on_four(self) -> dict[str, dict]:
        return in_layouts("moe", OF_EXPERTS, ["ep4 by nodes"])

    def dense_on_two_by_night(self) -> dict[str, dict]:
        return in_layouts("dense", TWO, ["fsdp2", "tp2"])

    def moe_on_two_by_night(self) -> dict[str, dict]:
        return in_layouts("moe", TWO, ["tp2 without sp", "cp2", "pp2"])

    def dense_on_four_by_night(self) -> dict[str, dict]:
        return in_layouts("dense", FOUR, ["hsdp2x2", "tp2 fsdp2", "pp2 tp2", "pp2 cp2"])

    def moe_on_four_by_night(self) -> dict[str, dict]:
        return in_layouts("moe", FOUR, ["tp2 cp2"])

    def dense_alone(self) -> dict[str, dict]:
        return {"alone": measured("dense", [], 1)}

    def moe_alone(self) -> dict[str, dict]:
        return {"alone": measured("moe", [], 1)}


def in_layouts(model: str, layouts: dict[str, list[str]], names: list[str]) -> dict[str, dict]:
    """What is measured in those of ``layouts`` that are named."""
    return {name: measured(model, layouts[name], dist.get_world_size()) for name in names}


CASES = [("dense_on_two", 2), ("moe_on_two", 2), ("dense_on_four", 4), ("moe_on_four", 4)]
BY_NIGHT = [pytest.param(f"{method}_by_night", ranks, marks=pytest.mark.nightly) for method, ranks in CASES]
ON_FOUR = [pytest.param(*case, marks=pytest.mark.nightly) for case in CASES if case[1] == 4]


@pytest.fixture(scope="module")
def alone():
    return {model: on_ranks(InLayouts, f"{model}_alone", 1)[0]["alone"] for model in MODELS}


@pytest.mark.parametrize(("method", "ranks"), [*CASES[:2], *ON_FOUR, *BY_NIGHT])
def test_values_gradients_and_changes_are_those_of_one_process(alone, method, ranks):
    expected = alone[method.partition("_")[0]]
    of_ranks = on_ranks(InLayouts, method, ranks)

    for layout in of_ranks[0]:
        for kind in of_ranks[0][layout]:
            found: Values = {}
            for one in of_ranks:
                compare(f"{layout}: {kind}", one[layout][kind] or {}, expected[kind])
                found |= one[layout][kind] or {}
            if not has_less(kind, layout):
                assert found.keys() == expected[kind].keys(), layout


def has_less(kind: str, layout: str) -> bool:
    """Return whether the layout lacks some values."""
    return "pp" in layout if kind in ("modules", "gradients", "effects") else kind == "of unnamed" and "tp" in layout


def compare(what: str, found: Values, expected: Values) -> None:
    for name, value in found.items():
        wanted = expected[name]
        assert value.shape == wanted.shape, f"{what} {name}: {tuple(value.shape)} in place of {tuple(wanted.shape)}"
        error = (value.double() - wanted.double()).nan_to_num(0.0).abs().max() / wanted.double().nan_to_num(
            0.0, neginf=0.0
        ).abs().max().clamp(min=1e-3)
        assert error < 1e-5, f"{what} {name}: off by {error:.1e}"


def test_a_change_does_something(alone):
    for model, found in alone.items():
        nothing = found["changes"]["nothing"]
        for name, logits in found["changes"].items():
            if name not in ("nothing", "patched with itself", "spliced with its error"):
                assert (logits - nothing).abs().max() > 1e-3, f"{model}: {name}"
        assert torch.equal(found["changes"]["patched with itself"], nothing)
        assert torch.equal(found["changes"]["spliced with its error"], nothing)
