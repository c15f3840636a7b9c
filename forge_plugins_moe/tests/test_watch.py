"""The callback ``experts``: what it keeps, tells and draws."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fork_server
from forge_core.cli import main
from forge_core.contracts.callback import Requests, RunContext, StepContext
from forge_core.errors import ConfigError
from forge_plugins_moe.coactivation import Coactivation
from forge_plugins_moe.config import WatchConfig
from forge_plugins_moe.dispatch import Assignments
from forge_plugins_moe.load_history import LoadHistory, read_loads
from forge_plugins_moe.watch import WatchExperts
from forge_testing.callback import CallbackConformance
from forge_testing.small_model import small_job

TOML = """
[run]
name = "watched"
dir = "{folder}/runs"

[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
max_seq_len = 64
num_experts = 8

[model.moe]
hidden_dim = 16

[data]
name = "text_files"
path = "{folder}/text"
pattern = "*.txt"

[train]
steps = 5
seq_len = 32
batch_size = 2
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-2

[metrics]
interval = 2

[[callbacks]]
name = "experts"
coactivation = true
"""
LAYERS = ["blocks.0.feed_forward", "blocks.1.feed_forward"]


class TestExperts(CallbackConformance):
    component = "forge-plugins-moe:experts"
    config = {"dead_after": 2, "coactivation": True}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("watched")
    (folder / "text").mkdir()
    for i in range(4):
        (folder / "text" / f"{i}.txt").write_text("\n".join(f"line {j}: {(i * 7919 + j) % 997}" for j in range(200)))
    path = folder / "job.toml"
    path.write_text(TOML.format(folder=folder))
    return path


@pytest.fixture(scope="module")
def watched(config) -> Path:
    """The directory of a run."""
    assert main(["run", str(config), "checkpoint.interval=0"]) == 0
    return config.parent / "runs" / "watched"


def test_keeps_the_load_that_the_metrics_are_of(watched):
    metrics = [json.loads(line) for line in (watched / "metrics.jsonl").read_text().splitlines()]
    violation = {line["step"]: [line[f"load_violation/{name}"] for name in LAYERS] for line in metrics}

    loads = read_loads(watched)

    assert [one.step for one in loads] == [1, 2, 4, 5] == [*violation]
    for one in loads:
        assert [*one.load] == LAYERS
        for layer, expected in zip(LAYERS, violation[one.step], strict=True):
            assert sum(one.load[layer]) == 2 * 32 * 2, "tokens, two experts each"
            assert max(one.load[layer]) / (sum(one.load[layer]) / 8) - 1 == pytest.approx(expected, rel=1e-5)
            assert len(one.pairs[layer]) == len(one.pairs[layer][0]) == 8


def test_draws_every_expert_of_every_layer(watched, capsys):
    page = (watched / "experts.html").read_text()
    (last,) = read_loads(watched)[-1:]
    busiest = max(range(8), key=last.load[LAYERS[1]].__getitem__)
    over_mean = last.load[LAYERS[1]][busiest] / 16

    assert f"<title>{LAYERS[1]}, expert {busiest}: {over_mean:.2f}</title>" in page
    assert page.count("<svg") == 1 + 1 + 2 + 2, "legend, all layers, each over time, pairs of each"
    (watched / "experts.html").unlink()
    assert main(["moe", "heat-map", str(watched)]) == 0
    assert (watched / "experts.html").read_text() == page
    assert main(["moe", "heat-map", str(watched.parent)]) == 2
    assert "experts.jsonl has no line" in capsys.readouterr().err


def test_a_layer_that_no_gradient_passes_says_nothing_of_its_experts(config):
    adapters = 'parallel.passes.lora={rank=2, include=["blocks.1.attention.*"]}'

    assert main(["run", str(config), "checkpoint.interval=0", "run.name=adapted", adapters]) == 0

    folder = config.parent / "runs" / "adapted"
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    below, above = ({key: last[key] for key in last if layer in key} for layer in LAYERS)
    assert len(below) == len(above) == 9
    assert set(below.values()) == {None}
    assert None not in above.values()
    assert [[sum(one.load[layer]) for layer in LAYERS] for one in read_loads(folder)][-1] == [0, 128]
    assert (folder / "experts.html").exists()


@pytest.mark.parametrize(
    "line", ["[]", "5", '{"step": 2}', '{"step": "2", "load": {"a": [1]}}', "\x00", '{"step": 2, "load": 3}']
)
def test_a_damaged_line_is_named(tmp_path, line):
    (tmp_path / "experts.jsonl").write_text(f'{{"step": 1, "load": {{"a": [1, 2]}}}}\n{line}\n')

    with pytest.raises(ConfigError, match=r"experts\.jsonl:2: is damaged"):
        read_loads(tmp_path)
    LoadHistory(tmp_path, pytest.fail).forget_after(9)
    assert [one.step for one in read_loads(tmp_path)] == [1]


def test_work_that_is_done_again_is_told_once(tmp_path):
    history = LoadHistory(tmp_path, pytest.fail)
    for step in (1, 2, 4):
        history.add(step, {"a": [step, 0]}, {})
    with (tmp_path / "experts.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # killed

    LoadHistory(tmp_path, pytest.fail).forget_after(2)
    history.add(4, {"a": [7, 0]}, {})

    assert [(one.step, one.load["a"]) for one in read_loads(tmp_path)] == [(1, [1, 0]), (2, [2, 0]), (4, [7, 0])]


def test_what_cannot_be_drawn_or_written_does_not_end_a_run(config, capsys):
    for name, blocked in (("picture", ".experts.html.new"), ("history", "experts.jsonl")):
        folder = config.parent / "runs" / name / blocked
        folder.mkdir(parents=True)
        (folder / "in the way").touch()

        code = main(["run", str(config), "checkpoint.interval=0", "train.steps=1", f"run.name={name}"])

        log = (folder.parent / "log.txt").read_text()
        assert code == 0, log + capsys.readouterr().err
        assert log.count("experts: cannot draw the picture: ") == 1
    assert log.count("experts: cannot read ") == 1
    assert log.count("experts: cannot write ") == 0, "one complaint about a file"


class HostReads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.fixture
def sparse(decoder):
    return decoder(num_experts=4, moe={"hidden_dim": 16})


@pytest.fixture
def run(tmp_path, sparse):
    return RunContext(
        job=small_job(10),
        run_dir=tmp_path,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        parts=[sparse],
        optimizer=torch.optim.SGD(sparse.parameters()),
        total_steps=10,
        requests=Requests(),
        log=[].append,
    )


def test_tells_of_an_expert_without_tokens_once_until_it_has_some(run, sparse, tmp_path):
    said = run.log.__self__
    callback = WatchExperts(WatchConfig(dead_after=4))
    callback.run_start(run)
    layer = sparse.blocks["1"].feed_forward
    sparse.blocks["0"].feed_forward.last_load.fill_(1)

    for step, load in enumerate([[9, 0, 1, 0]] * 5 + [[9, 1, 1, 0]] + [[9, 0, 1, 0]] * 4, 1):
        layer.last_load.copy_(torch.tensor(load))
        logged = step % 2 == 0
        with HostReads() as reads:
            callback.step_end(run, StepContext(step, 0, {}, logged=logged))
        assert logged or not reads.count
        assert bool(callback._looks) == logged
        callback.step_logged(run, step, {})

    assert said[0] == "experts: blocks.1.feed_forward: experts 1, 3 have had no token for 4 steps"
    assert said[1:] == ["experts: blocks.1.feed_forward: expert 1 has had no token for 4 steps"]


def test_experts_of_a_layer_that_counts_nothing_are_not_taken_for_dead(run, sparse):
    said = run.log.__self__
    callback = WatchExperts(WatchConfig(dead_after=4))
    callback.run_start(run)
    sparse.blocks["0"].feed_forward.last_load.fill_(1)
    loads = [[9, 0, 1, 1]] * 2 + [[0, 0, 0, 0]] * 6 + [[9, 0, 1, 1]] * 2

    for step, load in enumerate(loads, 1):
        sparse.blocks["1"].feed_forward.last_load.copy_(torch.tensor(load))
        callback.step_end(run, StepContext(step, 0, {}, logged=True))
        callback.step_logged(run, step, {})
        assert bool(said) == (step == 10), "four steps that count"

    assert said == ["experts: blocks.1.feed_forward: expert 1 has had no token for 4 steps"]


def test_a_run_that_goes_on_counts_on_and_tells_nothing_twice(run, sparse):
    said = run.log.__self__
    layer = sparse.blocks["1"].feed_forward
    sparse.blocks["0"].feed_forward.last_load.fill_(1)
    layer.last_load.copy_(torch.tensor([9, 0, 1, 0]))
    callback = WatchExperts(WatchConfig(dead_after=4))

    for first in (1, 3, 5, 7):  # two steps, and resumed
        state = json.loads(json.dumps(callback.state()))
        callback = WatchExperts(WatchConfig(dead_after=4))
        callback.load_state(state, callback.state_version)
        callback.run_start(run)
        for step in (first, first + 1):
            callback.step_end(run, StepContext(step, 0, {}, logged=step % 2 == 0))
        callback.step_logged(run, step, {})

    assert said == ["experts: blocks.1.feed_forward: experts 1, 3 have had no token for 4 steps"]


def test_a_run_that_is_saved_between_looks_counts_on_from_there(run, sparse):
    """Expert 1 has a token in step 3, and none in the four steps after, which are too few to tell of."""
    said = run.log.__self__
    layer = sparse.blocks["1"].feed_forward
    sparse.blocks["0"].feed_forward.last_load.fill_(1)
    callback = WatchExperts(WatchConfig(dead_after=5))
    callback.run_start(run)

    for step in range(1, 8):
        if step == 5:
            state = json.loads(json.dumps(callback.state()))
            callback = WatchExperts(WatchConfig(dead_after=5))
            callback.load_state(state, callback.state_version)
            callback.run_start(run)
        layer.last_load.copy_(torch.tensor([9, int(step == 3), 1, 1]))
        callback.step_end(run, StepContext(step, 0, {}, logged=step in (2, 7)))
        callback.step_logged(run, step, {})

    assert said == []


def test_a_run_that_goes_back_counts_from_there(run, sparse):
    said = run.log.__self__
    for block in sparse.blocks.values():
        block.feed_forward.last_load.copy_(torch.tensor([9, 0, 1, 1]))
    callback = WatchExperts(WatchConfig(dead_after=4))
    callback.run_start(run)

    for steps in ((1, 2, 3), (2, 3)):  # back to the state at the beginning, and then not far enough
        for step in steps:
            callback.step_end(run, StepContext(step, 0, {}, logged=True))
            callback.step_logged(run, step, {})
        callback.load_state({"step": 0}, 1)

    assert said == []


def test_pairs_are_those_of_tokens(sparse):
    layer = sparse.blocks["0"].feed_forward.train()
    pairs = Coactivation(layer, torch.device("cpu"))
    expert = torch.tensor([[0, 1], [0, 1], [0, 3], [2, 4], [0, 1]])  # 4 is none
    assignments = Assignments(
        torch.arange(5).repeat_interleave(2), expert.flatten(), torch.ones(10), top_k=2, some_to_none=True
    )

    for _ in range(2):
        layer.experts(torch.randn(1, 5, 32), assignments).sum().backward()
    layer.eval()
    other = Assignments(torch.arange(5), torch.full((5,), 2), torch.ones(5))
    layer.experts(torch.randn(1, 5, 32), other).sum().backward()

    assert pairs.counts.tolist() == [[8, 6, 0, 2], [6, 6, 0, 0], [0, 0, 2, 0], [2, 0, 0, 2]]
    assert pairs.fraction().tolist() == [[1, 0.75, 0, 0.25], [1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]]


@pytest.mark.nightly
def test_pairs_are_counted_once_where_activations_are_computed_again_in_a_compiled_model(config, watched):
    again = ["run.name=again", "parallel.passes.compile=true", "parallel.passes.activation_checkpointing=true"]

    run_alone(config, "train.steps=1", *again)

    (first,) = read_loads(config.parent / "runs" / "again")
    assert first == read_loads(watched)[0]


def test_layers_of_all_pipeline_stages_are_watched(config):
    """As in one process: the same seed is the same model, and the same samples."""
    expected = config.parent / "runs" / "whole"

    actions = 'parallel.passes.pipeline.actions=["1F0 1F1 1B0 1B1", "0F0 0F1 0B0 0B1"]'
    reversed_stages = ["parallel.pp=2", "parallel.passes.pipeline.schedule=custom", actions]
    for name, *layout in (["whole"], ["split", *reversed_stages, "--nproc", "2"]):
        run_alone(config, "train.steps=2", f"run.name={name}", "train.grad_accumulation=2", *layout)

    split = read_loads(config.parent / "runs" / "split")
    assert split == read_loads(expected)
    assert [*split[0].load] == LAYERS


def run_alone(config: Path, *settings: str) -> None:
    """In a process of its own."""
    finished = fork_server.run(
        [sys.executable, "-m", "forge_core", "run", str(config), "checkpoint.interval=0", *settings],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
