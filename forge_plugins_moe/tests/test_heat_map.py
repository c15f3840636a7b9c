"""``experts.html``: colours and axes."""

import json
import re

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
