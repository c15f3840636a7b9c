import os
import platform
import subprocess
import sys

import pytest

MEASURE = """
import os, sys
from pathlib import Path
from forge_core.run.process import keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

if sys.argv[1] == "keep":
    print(keep_freed_memory())
before = resident()
gradient = bytearray(200 << 20)
assert resident() - before > 190
del gradient
print(resident() - before > 190)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="nothing is kept without glibc")
@pytest.mark.parametrize(
    ("argument", "variables", "expected"),
    [
        ("keep", {}, ["True", "True"]),
        ("leave", {}, ["False"]),
        ("keep", {"MALLOC_TRIM_THRESHOLD_": "1000000"}, ["False", "False"]),
    ],
    ids=["kept", "given back", "as the environment has it"],
)
def test_what_is_freed_is_kept_for_the_next_step(argument, variables, expected):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}

    done = subprocess.run(
        [sys.executable, "-c", MEASURE, argument], env={**clean, **variables}, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == expected
