"""``experts.html``: colours and axes."""

import json
import re

from forge_core.cli import main
from forge_plugins_moe.heat_map import draw


def test_the_darkest_cell_has_the_most_and_the_axis_has_the_steps(tmp_path):
    load = [0, 2, 3, 4, 9, 30]
    lines = [{"step": step, "load": {"layer": load}} for step in range(100, 900, 100)]
    (tmp_path / "experts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    page = draw(tmp_path).read_text()

    cells = re.findall(r'fill="#(\w{6})"><title>expert (\d), step 500:', page)
    darkness = {int(expert): -sum(bytes.fromhex(colour)) for colour, expert in cells}
    assert sorted(darkness, key=darkness.__getitem__) == [0, 1, 2, 3, 4, 5]
    assert len(set(darkness.values())) == 6
    over_time = page[page.index("Over time") :]
    assert re.findall(r'y="14">(\d+)<', over_time) == ["100", "500"]


def test_a_report_has_the_newest_loads_of_each_run_and_is_told_of_a_damaged_one(tmp_path, capfd):
    loads = {"whole": [{"layer": [1, 1, 1, 1]}] * 30 + [{"layer": [0, 2, 4, 10]}] * 3, "damaged": [3], "dense": []}
    for name, lines in loads.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.toml").write_text("[train]\nsteps = 33\n")
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        if lines:
            texts = (json.dumps({"step": step, "load": load}) for step, load in enumerate(lines, 1))
            (tmp_path / name / "experts.jsonl").write_text("".join(f"{text}\n" for text in texts))

    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")]) == 0

    (section,) = re.findall(r'<section id="experts">.*?</section>', (tmp_path / "report.html").read_text(), re.S)
    assert "steps 30 to 33; the busiest is in layer: 2.38" in section
    values = re.findall(r"<title>layer, expert (\d): ([\d.]+)</title>", section)
    assert values == [("0", "0.08"), ("1", "0.54"), ("2", "1.00"), ("3", "2.38")]
    assert f"{tmp_path}/damaged/experts.jsonl:1: is damaged" in section
    assert "dense" not in section

    main(["report", str(tmp_path / "dense"), "--out", str(tmp_path / "dense.html")])
    assert "experts" not in (tmp_path / "dense.html").read_text()
