"""A run on a source that has an order of its own."""


def test_it_learns_towards_the_limit_of_the_source_and_resumes_where_it_was(tiny, training_values):
    data = [
        "data={name='synthetic', vocab_size=16, branching=2, validation=32}",
        "eval.interval=15",
        "scheduler={name='constant'}",
    ]

    straight = tiny.completed(*data, "train.steps=30", "run.name=straight")
    tiny.completed(*data, "train.steps=10", "checkpoint.interval=5")
    resumed = tiny.completed(*data, "train.steps=30")

    assert training_values(resumed) == training_values(straight)
    evaluated = [line["eval/loss"] for line in straight if "eval/loss" in line]
    assert 0.6365 < evaluated[-1] < evaluated[0]
    assert "shuffle" not in (tiny.path("straight") / "job.toml").read_text()
