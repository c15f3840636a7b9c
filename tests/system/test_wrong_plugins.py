"""Components that break their contract are named, and what they would have done is not done."""

from __future__ import annotations

import json
import re
import textwrap

import pytest

from forge_core.cli import main

PLUGIN = """
    from forge_core.api import Component, PassComponent, hookimpl

    def component(name):
        return Component(name=name, summary="wrong", factory=f"wrong.parts:{name}", config="wrong.config:Rate")

    @hookimpl
    def forge_schedulers():
        return [component("negative"), component("late_nan"), component("truth"), component("moody")]

    @hookimpl
    def forge_losses():
        return [component(name) for name in ("one_mean", "mean", "bare", "flat_each", "detached",
                                          "all_targets")]

    @hookimpl
    def forge_optimizers():
        return [component("in_backward"), component("on_itself"), component("rows"), component("local")]

    @hookimpl
    def forge_parallel_passes():
        for name in ("wraps", "adds"):
            yield PassComponent(name=name, summary="wrong", factory=f"wrong.parts:{name}", config="wrong.config:Rate",
                                phase="checkpointing")

    @hookimpl
    def forge_routers():
        return [component("nan_router")]

    @hookimpl
    def forge_data_sources():
        for name in (*(f"without_{part}" for part in ("tokenizer", "read", "length", "vocabulary", "rows")), "short"):
            yield Component(name=name, summary="wrong", factory=f"wrong.parts:{name}", config="wrong.config:Samples")

    @hookimpl
    def forge_callbacks():
        return [component("unlucky")]
"""
CONFIG = """
    import attrs

    from forge_core.contracts.data_source import DataSourceConfig

    @attrs.frozen(kw_only=True)
    class Samples(DataSourceConfig):
        pass

    @attrs.frozen(kw_only=True)
    class Rate:
        lr: float = 0.01
        weight_dtype: str = "nan"
"""
PARTS = """
    import math

    import numpy as np
    import torch
    import torch.nn.functional as F

    from torch import nn

    from forge_core.contracts.callback import Callback
    from forge_core.contracts.loss import LossSum
    from forge_core.contracts.router import Routing

    calls = []


    def negative(config, /, *, total_steps):
        return lambda step: 1 - step / 4


    def late_nan(config, /, *, total_steps):
        return lambda step: math.nan if step == total_steps else 1.0


    def truth(config, /, *, total_steps):
        return lambda step: step <= total_steps


    def moody(config, /, *, total_steps):
        def multiplier(step):
            calls.append(step)
            return -0.5 if calls.count(step) == 2 and step == 3 else 1.0
        return multiplier


    def _cross_entropy(hidden, head, targets):
        logits = head(hidden).float().flatten(0, -2)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum"), (targets != -100).sum()


    def one_mean(config, /):
        def loss(*given):
            total, count = _cross_entropy(*given)
            return LossSum(total / count, torch.ones_like(count))
        return loss


    def mean(config, /):
        def loss(*given):
            total, count = _cross_entropy(*given)
            return LossSum(total / count, count)
        return loss


    def flat_each(config, /):
        def loss(hidden, head, targets):
            total, count = _cross_entropy(hidden, head, targets)
            return LossSum(total, count, torch.zeros(targets.numel()))
        return loss


    def detached(config, /):
        return lambda *given: LossSum(*(one.detach() for one in _cross_entropy(*given)))


    def bare(config, /):
        return lambda *given: _cross_entropy(*given)[0]


    def all_targets(config, /):
        def loss(hidden, head, targets):
            counted = targets.numel() if not hidden.requires_grad and not head.training else (targets != -100).sum()
            return LossSum(_cross_entropy(hidden, head, targets)[0], torch.as_tensor(counted) + (not head.training))
        return loss


    def in_backward(config, /, *, parameters):
        optimizer = torch.optim.SGD([entry.parameter for entry in parameters], lr=config.lr)

        def update(parameter):
            parameter.data.sub_(0.01 * parameter.grad)

        for entry in parameters:
            entry.parameter.register_post_accumulate_grad_hook(update)
        return optimizer


    class Signed(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__([entry.parameter for entry in parameters], {"lr": lr})
            self.means = {}

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(self.direction(parameter), alpha=group["lr"])


    class OnItself(Signed):
        def direction(self, parameter):
            mean = self.means.setdefault(parameter, torch.zeros_like(parameter))
            return mean.lerp_(parameter.grad, 0.1).sign()


    class Rows(Signed):
        def direction(self, parameter):
            rows = parameter.grad.square().flatten(1).mean(1) if parameter.ndim > 1 else parameter.grad.square()
            self.state[parameter]["rows"] = rows + self.state[parameter].get("rows", 0)
            return parameter.grad.sign()


    class Local(Signed):
        def direction(self, parameter):
            gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
            self.state[parameter]["largest"] = gradient.abs().max()
            return parameter.grad.sign()


    def local(config, /, *, parameters):
        return Local(parameters, config.lr)


    def on_itself(config, /, *, parameters):
        return OnItself(parameters, config.lr)


    def rows(config, /, *, parameters):
        return Rows(parameters, config.lr)


    class Wrapped(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, *given):
            return self.block(*given)


    class wraps:
        def __init__(self, config, /):
            pass

        def apply(self, model, context):
            for name, block in model.blocks.items():
                model.blocks[name] = Wrapped(block)
            return model, ["blocks.0"]


    class adds(wraps):
        def apply(self, model, context):
            model.adapter = nn.Linear(2, 2, bias=False)
            return model, ["adapter"]


    class without_length:
        vocab_size, tokenizer = 256, None

        def __init__(self, config, /, **_):
            pass

        def read(self, indices):
            return {}


    class without_read:
        vocab_size, tokenizer, __init__ = 256, None, without_length.__init__

        def __len__(self):
            return 64


    class without_tokenizer(without_read):
        read = without_length.read

        def __getattribute__(self, name):
            if name == "tokenizer":
                raise AttributeError(name)
            return super().__getattribute__(name)


    class without_vocabulary(without_read):
        vocab_size, read = None, without_length.read


    class short(without_read):
        fingerprint = "1"

        def read(self, indices):
            return dict.fromkeys(("tokens", "targets"), np.zeros((len(indices), 5), np.int64))


    class without_rows(without_read):
        def read(self, indices):
            raise OSError("no rows")


    class unlucky(Callback):
        def __init__(self, config, /):
            pass

        def step_end(self):
            raise RuntimeError("no luck")


    class nan_router(nn.Module):
        def __init__(self, config, /, *, dim, n_experts):
            super().__init__()
            self.gate = nn.Linear(dim, n_experts, bias=False)
            self.weight_dtype = config.weight_dtype

        def forward(self, hidden, valid=None):
            weight, expert = self.gate(hidden).float().softmax(-1).max(-1)
            token = torch.arange(len(hidden), device=hidden.device)
            weight = weight * math.nan if self.weight_dtype == "nan" else weight.to(getattr(torch, self.weight_dtype))
            return Routing(token, expert, weight, {}, {}, top_k=1)

        def init_weights(self, rng, prefix, std):
            rng.fill(f"{prefix}gate.weight", self.gate.weight, lambda full, rng: full.normal_(generator=rng))
"""


FILES = {"wrong/plugin.py": PLUGIN, "wrong/config.py": CONFIG, "wrong/parts.py": PARTS}


@pytest.fixture
def run(tiny, make_distribution, capsys):
    """Runs the tiny job with wrong components in this process; returns exit code, what it said, and metrics."""
    make_distribution("wrong", "1.2", files=FILES)

    def run(*overrides):
        code = main(["run", str(tiny.config), *overrides])
        metrics = tiny.path() / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        captured = capsys.readouterr()
        return code, captured.out + captured.err, [json.loads(line) for line in lines]

    return run


@pytest.mark.parametrize(
    ("schedule", "said", "steps"),
    [
        ("negative", "gives -0.25 as the learning rate's multiplier of step 5", 0),
        ("late_nan", "gives nan as the learning rate's multiplier of step 10", 0),
        ("truth", "gives a bool as the learning rate's multiplier of step 1", 0),
        ("moody", "gives -0.5 as the learning rate's multiplier of step 3", 1),  # values arrive a step late
    ],
)
def test_a_schedule_with_a_multiplier_that_is_none_ends_the_run_before_the_update(run, schedule, said, steps):
    code, text, lines = run(f"scheduler={{name='{schedule}'}}")

    assert code == 2
    assert f"error: scheduler '{schedule}' of wrong 1.2 {said}" in text
    assert len(lines) == steps


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("one_mean", r"counts 1 targets where 128 are not -100"),
        ("mean", r"returns \S+ for 128 targets and \S+ for the two halves of them together"),
        ("bare", r"returns a Tensor, which must be a LossSum"),
        ("flat_each", r"returns an each that is no tensor of the targets' shape"),
        ("detached", r"returns a total through which no gradient reaches the model"),
    ],
)
def test_a_loss_that_is_no_sum_is_refused_in_the_first_step(run, loss, said):
    code, text, lines = run(f"loss={{name='{loss}'}}")

    assert code == 2
    assert re.search(f"error: loss '{loss}' of wrong 1.2 {said}", text), text
    assert not lines


@pytest.mark.parametrize(
    ("source", "lacks"),
    [
        ("without_tokenizer", "tokenizer"),
        ("without_read", "read"),
        ("without_length", "__len__"),
        ("without_vocabulary", "vocab_size"),
    ],
)
def test_a_data_source_that_lacks_a_part_is_refused_before_the_run(run, source, lacks):
    code, text, _ = run(f"data={{name='{source}'}}")

    assert code == 2
    assert f"error: data source '{source}' of wrong 1.2 has no {lacks}, which it needs. This is a bug in" in text


def test_a_data_source_of_shorter_samples_than_are_counted_is_refused_before_the_run(run):
    code, text, lines = run("data={name='short'}")

    assert code == 2
    assert "gives samples of 5 tokens, which must have train.seq_len = " in text
    assert not lines


BEGINNERS = """
    import numpy as np
    import torch
    from forge_core.api import component
    from forge_core.contracts.evaluation import Evaluation


    def sgd(parameters, **keys):
        made = type("Sgd", (torch.optim.Optimizer,), {"step": lambda self: None, **keys.pop("methods", {})})
        return made([entry.parameter for entry in parameters], keys)


    @component("optimizer", summary="wrong")
    def without_step(*, parameters):
        return type("Still", (torch.optim.Optimizer,), {})([entry.parameter for entry in parameters], {"lr": 0.1})


    @component("optimizer", summary="wrong")
    def without_rate(*, parameters):
        return sgd(parameters)


    @component("optimizer", summary="wrong")
    def with_closure(*, parameters):
        return sgd(parameters, lr=0.1, methods={"step": lambda self, closure: closure()})


    @component("scheduler", summary="wrong")
    def of_two(*, total_steps):
        return lambda step, epoch: 1.0


    @component("loss", summary="wrong")
    def of_logits():
        return lambda logits, targets: logits.sum()


    class Counting:
        vocab_size, tokenizer = 256, None

        def __init__(self, read):
            self.read = read

        def __len__(self):
            return 64


    @component("data_source", summary="wrong")
    def of_nothing(*, seq_len):
        return Counting(lambda indices: None)


    @component("data_source", summary="wrong")
    def of_int32(*, seq_len):
        return Counting(lambda at: dict.fromkeys(("tokens", "targets"), np.zeros((len(at), seq_len), np.int32)))


    @component("data_source", summary="wrong")
    def ends_early(*, seq_len):
        def read(indices):
            if len(indices) > 1:
                raise KeyError("text")
            return dict.fromkeys(("tokens", "targets"), np.zeros((len(indices), seq_len), np.int64))

        return Counting(read)


    @component("parallel_pass", phase="swap", summary="wrong")
    class GivesNothing:
        def apply(self, model, context):
            pass


    @component("evaluation", summary="wrong")
    class Divides(Evaluation):
        def __init__(self, *, open_data):
            pass

        def run(self, context):
            return {"share": 1 / 0}


    @component("evaluation", summary="wrong")
    class LooksWrongly(Divides):
        def look_at(self, parts, mesh, job):
            return parts[1]
"""


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        (
            "optimizer={name='without_step'}",
            2,
            "error: optimizer 'without_step' of FILE has no step of its own. This is",
        ),
        (
            "optimizer={name='without_rate'}",
            2,
            "error: optimizer 'without_rate' of FILE has a group of parameters whose",
        ),
        ("optimizer={name='with_closure'}", 1, "'closure'\nraised by optimizer file:beginners.py:with_closure\n"),
        ("scheduler={name='of_two'}", 1, "'epoch'\nraised by scheduler 'of_two' of FILE at step 1\n"),
        ("loss={name='of_logits'}", 1, "raised by loss 'of_logits' of FILE\n"),
        ("data={name='of_nothing'}", 1, "raised by data source 'of_nothing' of FILE\n"),
        ("data={name='of_int32'}", 2, "raised by data source file:beginners.py:of_int32\n"),
        (
            "data={name='ends_early'}",
            1,
            "at positions 0 to 3 were read\nraised by data source file:beginners.py:ends_early",
        ),
        ("parallel.passes.gives_nothing=true", 1, "raised by parallel pass 'gives_nothing' of FILE\n"),
        (
            "evaluations=[{name='divides'}]",
            1,
            "ZeroDivisionError: division by zero\nraised by evaluation 'divides' of FILE",
        ),
        ("evaluations=[{name='looks_wrongly'}]", 1, "\nraised by evaluation 'looks_wrongly' of FILE"),
    ],
)
def test_the_error_of_a_component_names_it(tiny, capsys, override, code, said):
    (tiny.folder / "beginners.py").write_text(textwrap.dedent(BEGINNERS))
    with tiny.config.open("a") as file:
        file.write('\n[plugins]\nfiles = ["beginners.py"]\n')

    assert main(["run", str(tiny.config), override, "train.steps=3"]) == code

    text = re.sub(r"file:beginners\.py [0-9a-f]{12}", "FILE", capsys.readouterr().err)
    assert said in text


def test_a_callback_that_raises_is_named_by_its_place_in_the_job(run):
    code, text, _ = run("callbacks=[{name='unlucky'}]")

    assert code == 1
    assert "error: RuntimeError: no luck\nraised by callbacks[0] plugin.wrong.callback.unlucky in step_end\n" in text


def test_a_loss_that_miscounts_in_evaluation_is_refused_there(run):
    code, text, lines = run("loss={name='all_targets'}", "eval.interval=2", "train.steps=4")

    assert code == 2
    assert re.search(r"error: loss 'all_targets' of wrong 1.2 counts \d+ targets of the validation data", text)
    assert [line["step"] for line in lines] == [1, 2]


def test_an_optimizer_that_updates_in_backward_is_refused(run):
    code, text, lines = run("optimizer={name='in_backward'}")

    assert code == 2, text
    assert "and 2" in text
    assert "changed while gradients were computed. Only the step of optimizer 'in_backward' of wrong 1.2" in text
    assert not lines


SPARSE = "model.feed_forward={name='moe', n_experts=2, hidden_dim=16, router={name='nan_router'}}"


def test_the_module_is_named_whose_output_was_the_first_that_was_not_finite(run, tiny):
    code, text, _ = run(SPARSE, "anomalies.roll_back_after=2")

    module = "blocks.0.feed_forward.router (nan_router of wrong 1.2)"
    assert code == 4
    assert text.count(f"the first output that is not finite is that of {module}") == 1
    assert f"Look at {module}, whose output was the first" in text
    events = [json.loads(line) for line in (tiny.path() / "events.jsonl").read_text().splitlines()]
    origins = [event["origin"] for event in events if event["event"] == "skipped"]
    assert [one and one["module"] for one in origins] == ["blocks.0.feed_forward.router", None]


def test_a_router_that_returns_another_dtype_is_refused_in_the_first_step(run):
    code, text, lines = run(SPARSE, "model.feed_forward.router.weight_dtype=float16")

    assert code == 2
    assert (
        "error: the router wrong:nan_router returned a Routing.weight in torch.float16, which must be in torch.f"
        in text
    )
    assert not lines


def test_an_optimizer_that_keeps_its_state_on_itself_is_named_at_the_first_save(run):
    code, text, _ = run("optimizer={name='on_itself'}", "checkpoint.interval=5")

    assert code == 0
    said = "optimizer 'on_itself' of wrong 1.2 has no state for any of the parameters that it has updated"
    assert text.count(said) == 1
    assert "its attribute 'means' holds tensors, which are not saved" in text


def test_state_that_is_sharded_otherwise_than_its_parameter_is_refused_at_the_first_save(run, tiny):
    code, text, _ = run("optimizer={name='rows'}", "train.precision=bf16", "checkpoint.interval=2")

    assert code == 2
    assert "error: optimizer 'rows' of wrong 1.2 keeps the state 'rows' of embed.weight sharded as " in text
    assert not list(tiny.path().glob("checkpoints/step_*"))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("wraps", r"renames blocks\.0\.(\S+) to blocks\.0\.block\.\1 and \d+ more"),
        ("adds", r"adds adapter\.weight"),
    ],
)
def test_a_pass_that_changes_the_names_of_parameters_is_refused(run, name, what):
    code, text, _ = run(f"parallel.passes.{name}=true")

    assert code == 2
    assert re.search(f"error: parallel pass '{name}' of wrong 1.2 {what}\\. A pass leaves the names", text), text


@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        (
            [SPARSE, "parallel.pp=2", "train.grad_accumulation=2", "anomalies.roll_back_after=2"],
            4,
            "first output that is not finite is that of blocks.0.feed_forward.router (nan_router of wrong 1.2)",
        ),
        (
            ["optimizer={name='local'}", "checkpoint.interval=2"],
            2,
            "optimizer 'local' of wrong 1.2 keeps a plain tensor as the state 'largest' of embed.weight, ()",
        ),
        (
            ["data={name='without_rows'}"],
            1,
            "error: OSError: no rows\nraised by data source 'without_rows' of wrong 1.2\n",
        ),
    ],
    ids=["stages", "shards", "factories"],
)
def test_two_ranks_end_together_and_say_it_once(tiny, make_distribution, monkeypatch, overrides, code, said):
    site = make_distribution("wrong", "1.2", files=FILES)
    monkeypatch.setenv("PYTHONPATH", str(site))

    done = tiny.run("--nproc", "2", *overrides)

    assert done.returncode == code, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(said) == 1
