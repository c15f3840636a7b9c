"""``forge report``: the page is complete in itself, says what the files say, and survives what is wrong with them."""

import json
import math
import os
import random
import re
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_plugins_monitor.report import run_record
from forge_plugins_monitor.report.chart import means, thinned
from forge_plugins_monitor.report.run_record import Curve, RunRecord, find_runs, read_runs
from forge_plugins_monitor.report.scaling import Scaling, points_of

JOB = '[run]\nname = "x"\n[train]\nsteps = 40\n[model]\nname = "acme:transformer"\n[optimizer]\nlr = 0.01\n'
VOID = {"meta", "link", "input", "br"}


class Page(HTMLParser):
    """Tags that are open and closed in pairs, texts by the tag around them, and the data in the page."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.texts, self.data = [], [], {}, []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)
            if self.open[-1] == "script" and self.tags[-1][1].get("type") == "application/json":
                self.data.append(json.loads(data))

    @property
    def charts(self):
        return {chart["title"]: chart for chart in self.data if isinstance(chart, dict)}

    @property
    def runs(self):
        (runs,) = (data for data in self.data if isinstance(data, list))
        return runs

    @property
    def cells(self):
        return self.texts.get("td", [])


@pytest.fixture
def make_run(tmp_path):
    def make(name, lines=(), events=(), job=JOB, tail=""):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "job.toml").write_text(job)
        if lines:
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
        if events:
            (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return folder

    return make


@pytest.fixture
def report(tmp_path, capfd):
    """Run the command; gives what it said, and the page if it is to be written."""

    def run(*arguments, code=0):
        out = tmp_path / "report.html"
        assert main(["report", *map(str, arguments), "--out", str(out)]) == code
        said = "".join(capfd.readouterr())
        return said, Page(out.read_text()) if code == 0 else None

    return run


def losses(n, scale=1.0):
    return [{"step": step, "loss": scale * step, "lr": 0.1} for step in range(1, n + 1)]


def test_every_metric_is_drawn_once_with_the_values_of_the_file(make_run, report):
    line = {"step": 1, "loss": 2.5, "loss/web": 2.25, "tokens": 64, "tokens/web": 32, "grad_norm": 1, "lr": 1e-3}
    more = {"tokens_per_second": 10.0, "mfu": 0.5, "memory_gib": 2.0, "update_ratio/head": 0.25, "skipped": 0}
    run = make_run("a", [line | more, {"step": 1, "eval/loss": 3.5, "eval/perplexity": 33, "eval/tokens": 7}])

    _, page = report(run)

    drawn = {title: chart["curves"] for title, chart in page.charts.items()}
    assert all(curves[0]["x"] == [1] and len(curves) == 1 for curves in drawn.values())
    assert {title: curves[0]["y"][0] for title, curves in drawn.items()} == {
        "Training loss": 2.5,
        "eval/loss": 3.5,
        "eval/perplexity": 33,
        "Learning rate": 1e-3,
        "Gradient norm, before clipping": 1,
        "Throughput": 10,
        "Model FLOPs utilisation": 0.5,
        "Peak memory of a GPU": 2,
        "loss/web": 2.25,
        "tokens/web": 32,
        "Tokens seen": 64,
        "update_ratio/head": 0.25,
        "skipped": 0,
        "eval/tokens": 7,
    }
    assert page.charts["Training loss"]["unit"] == page.charts["eval/loss"]["unit"] == "nats a token"


def test_a_loss_without_a_perplexity_is_not_in_nats(make_run, report):
    _, page = report(make_run("a", [*losses(2), {"step": 2, "eval/loss": 3.5, "eval/tokens": 7}]))

    assert page.charts["Training loss"]["unit"] == page.charts["eval/loss"]["unit"] == ""


def test_the_page_needs_nothing_from_elsewhere(make_run, report):
    _, page = report(make_run("a", losses(3)))

    links = [value for _, has in page.tags for key, value in has.items() if key in ("src", "href")]
    policy = next(has["content"] for _, has in page.tags if has.get("http-equiv") == "Content-Security-Policy")
    assert all(link.startswith("data:") for link in links)
    assert "default-src 'none'" in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", "".join(page.texts["script"] + page.texts["style"]))


def test_runs_stand_beside_each_other_with_what_differs(make_run, report):
    a = make_run("a", losses(3))
    b = make_run("b", losses(4, 2.0), job=JOB.replace("0.01", "0.02") + "warm = true\n")

    _, page = report(a, b)

    assert [run["label"] for run in page.runs] == ["a", "b"]
    assert [curve["y"] for curve in page.charts["Training loss"]["curves"]] == [[1, 2, 3], [2, 4, 6, 8]]
    cells = page.cells
    start = cells.index("0.01")
    assert cells[start : start + 4] == ["0.01", "0.02", "–", "true"]
    assert "optimizer.lr" in page.texts["th"]
    assert "train.steps" not in page.texts["th"]  # it is the same


def test_events_are_marked_and_listed(make_run, report):
    def at(second, event, **facts):
        return {"time": f"2026-11-23T10:00:{second:02}.000+00:00", "event": event, **facts}

    events = [
        at(0, "started", step=0, checkpoint=None),
        at(5, "saved", step=10),
        at(6, "skipped", step=12, reason="not finite"),
        at(7, "rolled_back", step=15, to_step=10),
        at(9, "preempted", step=20, reason="SIGTERM"),
        at(30, "resumed", step=20, checkpoint="step_00000020"),
        at(31, "saved", step=30),
        at(33, "completed", step=40),
    ]

    _, page = report(make_run("a", losses(40), events))

    assert page.runs[0]["events"] == [
        [10, "saved", "saved"],
        [30, "saved", "saved"],
        [20, "resumed", "resumed from step_00000020"],
        [12, "skipped", "step left out not finite"],
        [15, "rolled_back", "rolled back to step 10"],
    ]
    assert page.charts["Training loss"]["events"] is True
    assert {"completed", "40 of 40", "12.0 s", "rolled back", "2 times, this is the last one"} <= set(page.cells)


def test_names_and_values_of_strangers_are_text(make_run, report):
    name = '<b>&"x" <!--<script>'
    job = JOB + "tag = '</script><img src=x>'\nurl = 'https://me:secret@host/x'\n"
    run = make_run(name, [{"step": 1, "loss": 1.0, "</script><i>": 2.0}], job=job)
    other = make_run("other", losses(1))

    _, page = report(run, other)

    assert page.runs[0]["label"] == name
    assert "</script><i>" in page.charts
    assert not {"b", "i", "img"} & {tag for tag, _ in page.tags}
    assert not any("secret" in text for texts in page.texts.values() for text in texts)


def test_a_damaged_run_is_shown_as_far_as_it_can_be_read(make_run, report):
    run = make_run("a", losses(2), tail='not json\n[1]\n{"loss": 1}\n{"step": 3, "loss": NaN}\n{"step": 4, "lo')
    (run / "environment.json").write_text("{")
    (run / "job.toml").write_text("[train\n")

    said, page = report(run)

    assert page.charts["Training loss"]["curves"][0] == {"run": 0, "x": [1, 2, 3], "y": [1, 2, None]}
    assert f"{run / 'metrics.jsonl'}: 2 lines left out" in said
    assert "environment.json cannot be read" in said
    assert "job.toml cannot be read" in said
    assert any("environment.json cannot be read" in text for text in page.texts["p"])
    assert "a: 1 value not finite" in page.texts["p"]


def test_values_that_are_not_finite_are_gaps(make_run, report):
    tail = '{"step": 3, "loss": null, "lr": Infinity, "tokens": 1%s}\n' % ("0" * 400)

    _, page = report(make_run("a", losses(2), tail=tail))

    assert page.charts["Training loss"]["curves"][0]["y"] == [1, 2, None]
    assert page.charts["Learning rate"]["curves"][0]["y"] == [0.1, 0.1, None]
    assert page.charts["Tokens seen"]["curves"][0]["y"] == [None]


def test_a_run_without_metrics_yet_has_a_summary(make_run, report):
    _, page = report(make_run("a"))

    assert page.charts == {}
    assert {"not started", "0 of 40"} <= set(page.cells)


def test_a_run_is_shown_once_and_equal_names_get_their_folders(make_run, report, tmp_path):
    first, second = make_run("x/tiny", losses(1)), make_run("y/tiny", losses(2))
    (tmp_path / "link").symlink_to(first)

    said, page = report(first, second, tmp_path / "link", first)

    assert [run["label"] for run in page.runs] == ["x/tiny", "y/tiny"]
    assert ": 2 runs" in said


def test_a_folder_stands_for_the_runs_in_it(make_run, report, tmp_path):
    make_run("b", losses(1)), make_run("a", losses(1))
    (tmp_path / "runs" / "notes").mkdir()

    _, page = report(tmp_path / "runs")

    assert [run["label"] for run in page.runs] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "why"),
    [("empty", "there is no job.toml in it"), ("file.txt", "it is a file"), ("gone", "there is no such folder")],
)
def test_what_is_no_run_is_refused(report, make_run, tmp_path, name, why):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").touch()

    said, _ = report(make_run("a"), tmp_path / name, code=2)

    assert f"RUN: {tmp_path / name} is neither a run's directory nor a folder of runs: {why}" in said
    assert not (tmp_path / "report.html").exists()


def test_errors_with_passwords_or_file_names_that_are_no_utf8_are_written(report, make_run):
    error = "OSError: no a\udcff.txt at https://me:hidden@host/x"
    run = make_run("a", [{"step": 1, "loss": 2.0}], [{"event": "failed", "step": 1, "error": error}])

    _, page = report(run)

    told = r"OSError: no a\udcff.txt at https://me:***@host/x"
    assert [cell for cell in page.cells if "OSError" in cell] == [f"failed: {told}", told]


@pytest.mark.parametrize(
    ("name", "why"),
    [("no/page.html", "No such file or directory"), ("file/page.html", "Not a directory"), ("", "Is a directory")],
)
def test_a_page_that_cannot_be_written_is_a_sentence(make_run, tmp_path, capfd, name, why):
    (tmp_path / "file").touch()
    out = tmp_path / name

    code = main(["report", str(make_run("a")), "--out", str(out)])

    assert code == 2
    assert f"--out: cannot write {out}: {why}" in capfd.readouterr().err


def test_a_page_goes_into_a_pipe_and_leaves_it_there(make_run, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)

    assert main(["report", str(make_run("a")), "--out", str(pipe)]) == 0

    assert os.read(end, 1 << 16).startswith(b"<!doctype html>")
    os.close(end)
    assert pipe.is_fifo()


def test_thinning_keeps_the_ends_and_every_extreme():
    dice = random.Random(0)
    values = [dice.gauss(0, 1) for _ in range(10_000)]
    values[1234], values[7777], values[5000] = 99.0, -99.0, None
    curve = Curve(tuple(range(10_000)), tuple(values))

    few = thinned(curve, 800)

    kept = dict(zip(few.steps, few.values, strict=True))
    assert 700 < len(kept) <= 801
    assert kept[1234] == 99.0
    assert kept[7777] == -99.0
    assert kept[5000] is None
    assert {0, 9999} <= kept.keys()
    assert all(values[step] == value for step, value in kept.items())
    assert list(few.steps) == sorted(few.steps)
    for start in range(0, 10_000, 100):  # what is drawn of a stretch reaches about as far up and down
        drawn = [value for step, value in kept.items() if start - 25 <= step < start + 125 and value is not None]
        inside = [value for value in values[start : start + 100] if value is not None]
        assert max(drawn) >= max(inside)
        assert min(drawn) <= min(inside)


def test_means_stand_over_noisy_curves_alone():
    dice = random.Random(0)
    steps = tuple(range(1, 1001))
    noisy = [None if step == 5 else step + 100 * dice.gauss(0, 1) for step in steps]

    smooth = means(Curve(steps, tuple(noisy)))

    assert len(smooth.steps) == 100
    assert smooth.values[50] == pytest.approx(sum(noisy[500:510]) / 10)
    assert smooth.values[0] == pytest.approx(sum(value for value in noisy[:10] if value is not None) / 9)
    assert means(Curve(steps, tuple(map(float, steps)))).steps == ()
    assert means(Curve(steps, (1.0,) * 1000)).steps == ()
    assert means(Curve(steps, (None,) * 1000)).steps == ()


def test_a_short_curve_is_left_as_it_is():
    curve = Curve((1, 2), (math.pi, None))

    assert thinned(curve, 800) is curve


def test_steps_are_sorted_and_a_later_line_counts(make_run):
    run = make_run("a", [{"step": 5, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 5, "loss": 3.0, "kind": "x"}])

    (record,) = read_runs(find_runs([run]))

    assert record.curve("loss") == Curve((2, 5), (2.0, 3.0))
    assert record.metrics() == ["loss"]


def test_lines_of_other_names_and_kinds_stand_in_columns_as_in_the_file(make_run):
    lines = [
        {"step": 1, "loss": 4, "note": "x", "mixed": "x"},
        {"step": 2, "loss": None, "note": "y", "mixed": 1.5},
        {"step": 2, "eval/loss": 3.0},
        {"loss": 3.0, "step": 3, "is": True},
    ]

    (record,) = read_runs(find_runs([make_run("a", lines)]))

    assert record.metrics() == ["loss", "mixed", "eval/loss"]
    assert [record.curve(name) for name in ("loss", "mixed", "eval/loss", "step", "note")] == [
        Curve((1, 2, 3), (4.0, None, 3.0)),
        Curve((2,), (1.5,)),
        Curve((2,), (3.0,)),
        Curve((), ()),
        Curve((), ()),
    ]
    assert (record.last_step, list(record.lines)) == (3, lines)


def test_reading_a_long_run_takes_less_memory_than_its_file(make_run, monkeypatch):
    monkeypatch.setattr(run_record, "_AT_ONCE", 1 << 16)
    names = [f"loss/{i}" for i in range(8)]
    lines = ({"step": step, **{name: step + math.pi * i for i, name in enumerate(names)}} for step in range(10_000))
    run = make_run("a", lines)

    tracemalloc.start()
    try:
        (record,) = read_runs([run])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(record.curve("loss/7").steps) == 10_000
    assert peak < (run / "metrics.jsonl").stat().st_size


def scaled(make_run, sizes, law):
    """Runs of models of these sizes, each trained for 20 tokens a parameter, that end at the loss of a law."""
    for i, size in enumerate(sizes):
        tokens = 20 * size
        loss = law(6 * size * tokens)
        lines = [{"step": 1, "loss": 9.0, "tokens": tokens // 2}, {"step": 2, "loss": loss, "tokens": tokens}]
        folder = make_run(f"run{i}", lines)
        (folder / "environment.json").write_text(json.dumps({"n_parameters": size, "flops_per_token": 6 * size}))


@pytest.mark.parametrize(
    ("sizes", "floor"), [((10**6, 10**7, 10**8), 0.0), ([10**6 * 3**i for i in range(7)], 1.7)], ids=["3", "7 sizes"]
)
def test_a_power_law_through_the_ends_of_runs_is_found_again(report, make_run, tmp_path, sizes, floor):
    scaled(make_run, sizes, lambda compute: floor + 50 * compute**-0.09)

    _, page = report(tmp_path / "runs")

    assert "Scaling" in page.texts["h2"]
    words = " ".join(page.texts["p"])
    assert ("eval/loss" in words) is False
    found = re.search(r"loss = (?:([\d.]+) \+ )?([\d.]+) · C\^−([\d.]+)", words)
    assert float(found[1] or 0) == pytest.approx(floor, abs=0.02)
    assert float(found[3]) == pytest.approx(0.09, rel=0.03)
    assert sum(tag == "circle" for tag, _ in page.tags) == len(sizes)
    assert f"{sizes[0]:,}" in page.cells


def test_there_is_no_scaling_of_runs_of_one_size_or_without_their_costs(report, make_run, tmp_path):
    scaled(make_run, [10**6, 10**6, 10**7], lambda compute: compute**-0.1)
    make_run("old", [{"step": 1, "loss": 2.0, "tokens": 5}])

    _, page = report(tmp_path / "runs")

    assert "Scaling" not in page.texts["h2"]


def section(*ends) -> str:
    """The scaling section of runs, each given as its environment and its last line."""
    runs = [
        RunRecord(index=i, label=f"r{i}", path=Path(f"r{i}"), lines=[line], events=[], job={}, environment=environment)
        for i, (environment, line) in enumerate(ends)
    ]
    return Scaling().render(runs)


def end(size, loss, tokens=None, changed=None):
    line = {"step": 10, "tokens": tokens or 20 * size, "loss": loss}
    environment = {"n_parameters": size, "flops_per_token": 6 * size}
    for table in (line, environment):
        table.update({key: value for key, value in (changed or {}).items() if key in table})
    return environment, line


@pytest.mark.parametrize("spread", [1.0, 1.02, 1.9])
def test_nearly_equal_computes_have_a_picture_and_no_law(spread):
    sizes = [10**6, 2 * 10**6, 4 * 10**6]
    tokens = [10**9, 5 * 10**8, int(25 * 10**7 * spread)]

    html = section(*(end(size, 3.0 - i, tokens[i]) for i, size in enumerate(sizes)))

    assert "No law is fitted: the highest compute is" in html
    assert html.count("<circle") == 3
    assert "fitted</th>" not in html
    assert "cursor" not in html


@pytest.mark.parametrize("slope", [0.1, 0.0])
def test_a_loss_that_does_not_fall_has_no_law(slope):
    html = section(*(end(10 ** (i + 6), 2.0 + slope * i) for i in range(5)))

    assert "the loss does not fall with compute" in html
    assert html.count("<circle") == 5
    assert "C^" not in html


def test_the_cost_of_a_loss_is_that_of_the_step_at_which_it_was_evaluated():
    lines = [{"step": 8, "eval/loss": 3.0}, {"step": 10, "loss": 2.5, "tokens": 1000}]
    environment = {"n_parameters": 50, "flops_per_token": 300}
    run = RunRecord(index=0, label="r", path=Path("r"), lines=lines, events=[], job={}, environment=environment)

    (point,), name = points_of([run])

    assert (name, point.loss, point.tokens, point.compute) == ("eval/loss", 3.0, 800, 240_000)


def test_a_floor_takes_five_sizes_and_not_five_runs():
    points = [(size, 1.7 + 50 * (120 * size**2) ** -0.09) for size in (10**6, 10**7, 10**8, 10**9, 10**10)]

    assert " + " not in section(*(2 * [end(*point) for point in points[:3]]))
    assert " + " in section(*(end(*point) for point in points))


@pytest.mark.parametrize("value", [None, "12", True, math.inf, 10**400, -5, 0, math.nan, [], 1e-320])
@pytest.mark.parametrize("key", ["n_parameters", "flops_per_token", "tokens", "loss"])
def test_a_run_of_odd_numbers_is_left_out_alone(key, value):
    good = [end(10 ** (i + 6), 3.0 - i / 2) for i in range(3)]

    assert section(*good, end(5, 4.0, changed={key: value})) == section(*good)


@pytest.mark.parametrize("step", [0, -3, 10**400])
def test_a_run_of_odd_steps_is_left_out_alone(step):
    good = [end(10 ** (i + 6), 3.0 - i / 2) for i in range(3)]

    assert section(*good, end(5, 4.0, changed={"step": step})) == section(*good)


def test_losses_that_no_power_spans_have_a_picture_and_no_law():
    html = section(end(10**12, 1e50), end(10**12 + 10**11, 1.0), end(15 * 10**11, 1e-25))

    assert "the losses are too far from each other" in html
    assert html.count("<circle") == 3
