"""What callbacks know of many things at once gets to every tracker, which may draw it."""

import json

from forge_core.cli import main

PLUGIN = """
    from forge_core.api import Component, hookimpl

    @hookimpl
    def forge_trackers():
        for name in ("drawing", "plain", "failing"):
            yield Component(name=name, summary="for a test", factory=f"acme.parts:{name}", config="acme.config:Empty")
"""
CONFIG = """
    import attrs

    @attrs.frozen(kw_only=True)
    class Empty:
        '''Nothing.'''
"""
PARTS = """
    import json

    from forge_core.contracts.tracker import Tracker


    class Plain(Tracker):
        def __init__(self, config, /, *, run_dir, **_):
            self.file = run_dir / "series.jsonl"


    class Drawing(Plain):
        def log_series(self, step, series):
            with self.file.open("a") as file:
                file.write(json.dumps({"step": step, "load": series}) + "\\n")


    class Failing(Plain):
        def log_series(self, step, series):
            raise OSError("the service is down")


    drawing, plain, failing = Drawing, Plain, Failing
"""


def test_trackers_are_given_the_load_of_every_expert(tiny, make_distribution):
    make_distribution("acme", files={"acme/plugin.py": PLUGIN, "acme/config.py": CONFIG, "acme/parts.py": PARTS})
    trackers = "trackers=[{name='failing'},{name='plain'},{name='drawing'}]"

    code = main(
        ["run", str(tiny.config), trackers, "callbacks=[{name='experts'}]", "--model.num_experts=4", "train.steps=3"]
    )

    assert code == 0
    drawn, kept = (
        [json.loads(line) for line in (tiny.path() / name).read_text().splitlines()]
        for name in ("series.jsonl", "experts.jsonl")
    )
    assert [line["step"] for line in drawn] == [1, 2, 3]
    assert len(kept[0]["load"]) == 2
    for line, expected in zip(drawn, kept, strict=True):
        assert line["load"] == {f"load/{layer}": load for layer, load in expected["load"].items()}
    assert (tiny.path() / "log.txt").read_text().count("the service is down") == 1
