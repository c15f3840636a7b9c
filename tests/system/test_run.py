"""What a run leaves behind, and how it ends."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

import fork_server
from forge_core.checkpoint.store import CheckpointStore, open_checkpoint
from forge_core.cli import main
from forge_core.run.summary import emulation_words
from forge_core.train.executor import PlainExecutor
from forge_core.train.trainer import Trainer


@pytest.fixture(scope="module")
def finished(shared_tiny):
    shared_tiny.completed("eval.interval=5", "checkpoint.interval=4")
    return shared_tiny


def test_the_run_directory_has_the_files_that_others_rely_on(finished):
    path = finished.path()

    assert {entry.name for entry in path.iterdir()} == {
        "job.toml",
        "environment.json",
        "metrics.jsonl",
        "events.jsonl",
        "log.txt",
        "checkpoints",
    }
    saved = sorted(entry.name for entry in (path / "checkpoints").iterdir())
    assert saved == ["latest", "step_00000004", "step_00000008", "step_00000010"]
    environment = json.loads((path / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert "forge-plugins-dense" in environment["plugins"]
    assert environment["mesh"]["dp_shard"] == 1
    assert environment["host"]


def test_a_warm_up_in_tokens_is_over_once_they_are_seen_by_any_number_of_ranks(shared_tiny):
    """1000 tokens are 8 steps of 128; on two ranks 4 of 256."""
    warm_up = 'scheduler={name="constant", warmup_tokens=1000}'
    for settings, warm_up_steps in (([], 8), (["--nproc", "2"], 4)):
        name = f"tokens{warm_up_steps}"

        lines = shared_tiny.completed(f"run.name={name}", warm_up, *settings)

        rates = [line["lr"] for line in lines if "loss" in line]
        assert rates == pytest.approx([1e-2 * min(1, step / warm_up_steps) for step in range(1, 11)])
        ends = [line["tokens"] for line in lines if "loss" in line]
        targets = [line["targets"] for line in lines if "loss" in line]
        assert json.dumps(targets) == json.dumps([ends[0]] * 10)  # of both ranks, and whole numbers


def test_at_its_end_a_run_says_how_long_it_took_how_good_it_is_and_what_comes_next(finished):
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "
    *lines, last = (finished.path() / "log.txt").read_text().splitlines()

    assert all(re.match(stamp, line) for line in lines)
    loss = next(line["eval/loss"] for line in reversed(finished.metrics()) if "eval/loss" in line)
    place = re.escape(str(finished.path()))
    assert re.fullmatch(rf"{stamp}done: 10 steps in [\d.]+ s; eval/loss {loss:.4g}; forge generate {place}", last)


def test_logged_steps_have_the_keys_that_others_rely_on(finished):
    lines = [line for line in finished.metrics() if "loss" in line]

    assert [line["step"] for line in lines] == list(range(1, 11))
    for line in lines:
        assert line.keys() >= {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds"}
        assert line["tokens"] == line["step"] * 4 * 32
        assert 0 <= line["data_seconds"] <= line["step_seconds"]
    assert lines[0]["loss"] == pytest.approx(5.55, abs=0.1)  # ln 257: a fresh model knows nothing
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_a_start_says_that_the_cpu_emulates_what_is_to_be_computed_in(shared_tiny, monkeypatch, capsys):
    monkeypatch.setattr("forge_core.run.summary.emulates_bf16", lambda device: device.type == "cpu")

    for precision, said in (("fp32", ""), ("bf16_pure", "bf16"), ("fp16", "fp16")):
        shared_tiny.completed(f"train.precision={precision}", "train.steps=3", f"run.name={precision}")

        out = capsys.readouterr().out
        assert ("note: train.precision: this CPU emulates" in out) is bool(said)
        assert f'emulates {said}; "fp32" takes' in out or not said


@pytest.mark.parametrize(
    ("precision", "said"),
    [("bf16", 'this GPU emulates bf16; "fp16"'), ("bf16_pure", "this GPU"), ("fp16", ""), ("fp32", "")],
)
def test_a_start_on_a_gpu_without_bf16_says_so(monkeypatch, precision, said):
    monkeypatch.setattr("forge_core.run.summary.emulates_bf16", lambda device: True)

    assert emulation_words(precision, torch.device("cuda")).startswith(said)
    assert bool(emulation_words(precision, torch.device("cuda"))) is bool(said)


def test_evaluations_cover_the_whole_validation_set_and_the_last_step(finished):
    lines = [line for line in finished.metrics() if "eval/loss" in line]

    assert [line["step"] for line in lines] == [5, 10]
    assert lines[1]["eval/loss"] < lines[0]["eval/loss"]
    assert lines[1]["eval/perplexity"] == pytest.approx(2.718281828459045 ** lines[1]["eval/loss"])
    assert lines[0]["eval/tokens"] == lines[1]["eval/tokens"] > 1000


BEST_BY_ACCURACY = (
    "train.steps=8",
    "checkpoint={interval=2, keep_last=1, keep_best=1, best_is='highest', best_metric='eval/accuracy/accuracy'}",
    "evaluations=[{name='accuracy', interval=2}]",
)


def test_the_best_checkpoint_is_told_by_any_value_of_an_evaluation(shared_tiny):
    lines = shared_tiny.completed("run.name=best", *BEST_BY_ACCURACY)

    measured = {line["step"]: line["eval/accuracy/accuracy"] for line in lines if "eval/accuracy/accuracy" in line}
    assert [*measured] == [2, 4, 6, 8]
    assert len({*measured.values()}) > 1
    steps = CheckpointStore(shared_tiny.path("best") / "checkpoints").steps()
    assert steps == sorted({max(measured, key=lambda step: (measured[step], -step)), 8})


def test_a_value_that_an_evaluation_does_not_give_is_named_and_no_checkpoint_is_lost(shared_tiny, capsys):
    shared_tiny.completed("run.name=unmeasured", *BEST_BY_ACCURACY, "checkpoint.best_metric=eval/accuracy/precision")

    said = capsys.readouterr().out
    assert "step 2: checkpoint.best_metric = 'eval/accuracy/precision' was not measured, only eval/accuracy/acc" in said
    assert CheckpointStore(shared_tiny.path("unmeasured") / "checkpoints").steps() == [2, 4, 6, 8]


def test_the_perplexity_of_what_is_no_number_is_none_either(shared_tiny, monkeypatch, capsys):
    def nothing(self, batch):
        return torch.tensor(math.nan), (batch["targets"] != -100).sum()

    monkeypatch.setattr(PlainExecutor, "evaluate", nothing)

    shared_tiny.completed("eval.interval=3", "train.steps=3", "run.name=no-number")

    assert "eval/loss nan nats a token  perplexity nan" in capsys.readouterr().out


def test_an_evaluation_of_some_batches_takes_the_same_samples_however_a_step_is_cut(shared_tiny):
    """Two batches, each of the four samples of a step."""
    some = ["eval.batches=2", "eval.interval=3", "train.steps=3", "train.seed=3"]
    layouts = {
        "at-once": ["train.batch_size=4"],
        "microbatches": ["train.batch_size=1", "train.grad_accumulation=4"],
        "ranks": ["train.batch_size=2", "--nproc", "2"],
    }
    found = []
    for name, layout in layouts.items():
        lines = shared_tiny.completed(*some, *layout, f"run.name={name}")
        (line,) = [line for line in lines if "eval/loss" in line]
        found.append((line["eval/tokens"], line["eval/loss"]))

    assert [tokens for tokens, _ in found] == [2 * 4 * 32] * 3
    assert [loss for _, loss in found] == pytest.approx([found[0][1]] * 3, rel=1e-5)


def test_the_resolved_job_is_a_configuration_that_runs_the_same(finished, training_values):
    again = [f"run.name={'again'}"]
    job = finished.path() / "job.toml"

    assert main(["run", str(job), *again]) == 0

    assert training_values(finished.metrics("again")) == training_values(finished.metrics())


def test_a_finished_run_is_not_trained_again(finished, capsys):
    before = (finished.path() / "metrics.jsonl").read_text()

    assert main(["run", str(finished.config), "eval.interval=5", "checkpoint.interval=4"]) == 0

    assert "nothing to do" in capsys.readouterr().out
    assert (finished.path() / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (b"", "prompts.txt is empty; write one prompt a line"),
        (b"one\n\ntwo\n", "prompts.txt:2: the line is empty; a prompt has some text"),
        (b"\xef\xbb\xbfone\x0c\r\n\x0bt\rwo\n\n", "prompts.txt:3: the line is empty"),
        (b"\xff\n", "prompts.txt cannot be read"),
    ],
)
def test_prompts_that_are_none_are_refused(tmp_path, capsys, prompts, said):
    (tmp_path / "prompts.txt").write_bytes(prompts)

    assert main(["generate", "runs/none", "--prompt-file", str(tmp_path / "prompts.txt")]) == 2

    assert said in capsys.readouterr().err


def test_a_prompt_of_other_bytes_than_utf_8_is_refused(capsys):
    assert main(["generate", "runs/none", "--prompt", os.fsdecode(b"\xff")]) == 2

    assert "--prompt: '\\udcff' is not UTF-8" in capsys.readouterr().err


def test_a_checkpoint_alone_can_be_sampled_from(finished, tmp_path, capsys):
    alone = tmp_path / "elsewhere"
    (finished.path() / "checkpoints" / "step_00000008").rename(alone)
    try:
        arguments = ["--max-new-tokens", "12", "--prompt", "line 1", "--prompt", "file", "--temperature", "0"]
        assert main(["generate", str(alone), *arguments]) == 0
        said = capsys.readouterr().out
        assert main(["generate", str(alone), *arguments]) == 0
    finally:
        alone.rename(finished.path() / "checkpoints" / "step_00000008")

    assert "line 1" in said
    assert "--- 2 of 2" in said
    assert capsys.readouterr().out == said


def test_a_dry_run_builds_everything_and_writes_nothing(tiny, capsys):
    code = main(["run", str(tiny.config), "--dry-run", "--parallel.passes.fsdp=true", "parallel.passes.compile=true"])

    said = capsys.readouterr().out
    assert code == 0
    assert "parameters" in said
    assert said.index("forge-plugins-parallel:compile") < said.index("forge-plugins-parallel:fsdp")
    assert "blocks.0–1" in said
    assert not (tiny.folder / "runs").exists()

    main(
        ["run", str(tiny.config), "--dry-run", "parallel.passes.compile=true", "plugins.disable=['forge-plugins-plan']"]
    )

    assert "passes forge-plugins-parallel:compile\n" in capsys.readouterr().out, "without what makes the table"


def _wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_a_signal_saves_and_leaves_with_3_and_the_same_command_continues(tiny):
    settings = ["--nproc", "1", "train.batch_size=2", "train.grad_accumulation=2", "train.steps=300"]
    running = fork_server.Popen(
        tiny.command(*settings), env=tiny.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _wait_for(lambda: (tiny.path() / "metrics.jsonl").exists() and len(tiny.metrics()) > 3)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)

    assert running.returncode == 3, out + err
    stopped_at = tiny.metrics()[-1]["step"]
    assert stopped_at < 300
    assert open_checkpoint(tiny.path() / "checkpoints" / "latest").step == stopped_at

    settings[-1] = f"train.steps={stopped_at + 3}"
    done = tiny.run(*settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resumed from step_{stopped_at:08d}" in done.stdout
    assert [line["step"] for line in tiny.metrics()] == list(range(1, stopped_at + 4))


def test_values_that_are_not_finite_end_the_run_with_4_and_are_never_saved(tiny, capfd):
    code = main(["run", str(tiny.config), "optimizer.lr=1e30", "train.clip_norm=0", "checkpoint.interval=1"])

    assert code == 4
    assert "not finite" in capfd.readouterr().err
    newest = open_checkpoint(tiny.path() / "checkpoints" / "latest")
    values = {key: torch.empty(e.size, dtype=e.properties.dtype) for key, e in newest.saved_tensors().items()}
    newest.load(values)
    losses = {line["step"]: line["loss"] for line in tiny.metrics()}
    assert losses[newest.step] == losses[newest.step]  # the step it was saved at was a number, not NaN


def test_torchrun_starts_the_same_run_and_the_working_folder_is_no_source_of_modules(
    tiny, shared_tiny, training_values, tmp_path, monkeypatch
):
    for name in ("random", "atexit", "forge_plugins_dense"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the working folder')")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = ["train.batch_size=2", "train.steps=4"]
    done = subprocess.run(
        [*torchrun, "-m", "forge_core", "run", str(tiny.config), *settings],
        env=tiny.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    monkeypatch.chdir(tmp_path)
    assert training_values(tiny.metrics()) == training_values(
        shared_tiny.completed("--nproc", "2", *settings, "run.name=launched")
    )


ADAMW, MUON = '{name="adamw", lr=1e-2}', '{name="muon", lr=1e-2}'
WITHOUT_WAITING = {
    "adamw": [],
    "four microbatches": ["train.grad_accumulation=4"],
    **{name: [f"optimizer={{name='{name}', lr=1e-2}}"] for name in ("lion", "sgd", "adafactor", "schedule_free_adamw")},
    "adamw_8bit": ["optimizer={name='adamw_8bit', lr=1e-2, min_elements=0}"],
    "rounded": ["train.precision=bf16_pure", "optimizer.stochastic_rounding=true"],
    "split": ["train.precision=bf16_pure", "optimizer.rounding=split"],
    "grouped": [
        f'optimizer={{name="grouped", groups=[{{roles=["matrix"], optimizer={MUON}}}, {{optimizer={ADAMW}}}]}}'
    ],
    "phases": ['phases=[{at=3, train=["head.*"], lr_scale=0.5}, {at=6, lr_scale={"blocks.*"=2}}]'],
    "reports": ['callbacks=[{name="layer_norms"}, {name="activation_norms"}, {name="ema"}]'],
    "evaluations": ['evaluations=[{name="perplexity", interval=6}, {name="accuracy", interval=3}]'],
}


@pytest.mark.parametrize("case", WITHOUT_WAITING)
def test_the_host_waits_for_the_device_only_for_logged_steps(tiny, monkeypatch, case):
    """Counted, not timed: reading a tensor's value is an operation that the dispatcher sees."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2")
            Reads.count += function.overloadpacket.__name__ in names
            return function(*args, **(kwargs or {}))

    fetches, counted, train_step = [], [], Trainer._train_step

    def counting(self, microbatches):
        fetch = self.metrics.fetch
        before = Reads.count, len(fetches)
        self.metrics.fetch = lambda: fetch() if self.metrics._pending is None else fetches.append(1) or fetch()
        with Reads():
            counts = train_step(self, microbatches)
        self.metrics.fetch = fetch
        counted.append(Reads.count - before[0] + len(fetches) - before[1])
        return counts

    monkeypatch.setattr(Trainer, "_train_step", counting)
    tiny.completed(*WITHOUT_WAITING[case], "train.batch_size=1", "metrics.interval=4")

    # steps 1, 4, 8 and 10 are logged; their values are fetched in the step after, those of the last after the loop; in
    # the first one, the host waits as it looks into what the loss returns
    assert counted[1:] == [1, 0, 0, 1, 0, 0, 0, 1, 0]
