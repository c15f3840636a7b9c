"""What the engine owes a callback that joins a run to others: tries that did not count leave nothing behind, and what
one replica hands over is everything."""

import pytest

from forge_core.errors import ConfigError

LONE = """
import copy
from forge_core.contracts.replication import Replication, Share

class Lone(Replication):
    '''A replica whose others are always lost: some steps count at the second try only.'''

    def __init__(self, config):
        self.again, self.early, self.votes = config.again, None, 0

    def join(self, handover):
        self.handover = handover

    def begin_step(self):
        if self.votes == 4:  # it loses everything since, and is given what it was at the beginning of step 3
            self.votes = 100
            self.handover.take(self.early)
        if self.votes == 2:
            self.early = copy.deepcopy(self.handover.give())
        return Share(0, 1, 0)

    def sum(self, tensors):
        return True

    def commit(self):
        self.votes += 1
        if self.votes == 2 and self.again:
            self.again = False
            self.votes -= 1
            return False
        return True
"""
PLUGIN = """
from forge_core.api import Component, hookimpl
FORGE_API = "1.0"

@hookimpl
def forge_callbacks():
    yield Component(name="lone", summary="-", factory="acme_lone.lone:Lone", config="acme_lone.config:Config")
"""
CONFIG = """
import attrs

@attrs.frozen(kw_only=True)
class Config:
    again: bool = True
"""


@pytest.fixture
def lone(make_distribution):
    files = {"acme_lone/plugin.py": PLUGIN, "acme_lone/lone.py": LONE, "acme_lone/config.py": CONFIG}
    make_distribution("acme-lone", files=files)


def test_a_step_that_did_not_count_and_a_state_that_was_handed_over_change_nothing(tiny, lone, training_values):
    plain = training_values(tiny.completed("run.name=plain", "train.grad_accumulation=2"))

    replica = training_values(tiny.completed('callbacks=[{name="lone"}]', "train.grad_accumulation=2"))

    # step 2 was tried twice; steps 3 and 4 were done, taken back, and done again
    assert [line[0] for line in replica] == [1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 9, 10]
    assert replica[:4] == plain[:4]
    assert replica[4:] == plain[2:]


def test_the_average_of_a_callback_is_handed_over_too(tiny, lone):
    """Bit for bit: what was evaluated, and its tensors."""
    average, settings = '{name="ema", decay=0.5}', ("train.grad_accumulation=2", "eval.interval=5")
    plain = tiny.completed("run.name=plain", f"callbacks=[{average}]", *settings)

    replica = tiny.completed(f'callbacks=[{{name="lone"}}, {average}]', *settings)

    of_plain, of_replica = ([line["eval/loss"] for line in lines if "eval/loss" in line] for lines in (plain, replica))
    assert len(of_plain) == 2
    assert of_replica == of_plain


def test_a_job_has_one_such_callback(tiny, lone):
    with pytest.raises(ConfigError, match="each join replicas; keep one"):
        tiny.completed('callbacks=[{name="lone"}, {name="lone"}]')


def test_streams_are_not_dealt_among_replicas(tiny, lone):
    (tiny.folder / "a.jsonl").write_text('{"text": "a text that is long enough for a sample"}\n')
    data = f"data={{name='huggingface_streaming', path='json', data_files='{tiny.folder}/a.jsonl', streams=1}}"
    pytest.importorskip("datasets")

    with pytest.raises(ConfigError, match=r"callback\.lone joins replicas, among which streams cannot be dealt"):
        tiny.completed('callbacks=[{name="lone"}]', data)
