"""What a step of a CPU run frees is there for the next one."""

import platform
import subprocess

import pytest

FILES = {
    "acme_freeing/plugin.py": """
from forge_core.api import Component, hookimpl
FORGE_API = "1.0"

@hookimpl
def forge_callbacks():
    yield Component(
        name="freeing", summary="-", factory="acme_freeing.freeing:Freeing", config="acme_freeing.config:Config"
    )
""",
    "acme_freeing/config.py": """
import attrs

@attrs.frozen(kw_only=True)
class Config:
    pass
""",
    "acme_freeing/freeing.py": """
import os
from pathlib import Path

from forge_core.contracts.callback import Callback

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

class Freeing(Callback):
    def __init__(self, config):
        pass

    def run_end(self, run, step, stopped):
        before = resident()
        gradient = bytearray(200 << 20)
        del gradient
        run.log(f"kept: {resident() - before > 150}")
""",
}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="nothing is kept without glibc")
@pytest.mark.parametrize(
    ("variables", "said"), [({}, "kept: True"), ({"MALLOC_TRIM_THRESHOLD_": "1000000"}, "kept: False")]
)
def test_a_run_keeps_it_unless_the_environment_says_otherwise(tiny, make_distribution, variables, said):
    site = make_distribution("acme-freeing", files=FILES)
    environment = {**tiny.environment(), "PYTHONPATH": str(site), **variables}

    done = subprocess.run(
        tiny.command("train.steps=3", 'callbacks=["freeing"]'), env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert said in done.stdout
