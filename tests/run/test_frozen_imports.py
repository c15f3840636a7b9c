import subprocess
import sys

SCRIPT = """
import gc, sys
from forge_core.run.process import frozen_imports

with frozen_imports():
    assert not gc.isenabled()
    import decimal
assert gc.isenabled()
assert gc.get_freeze_count() > 0
assert all(one is not decimal.__dict__ for one in gc.get_objects())
"""


def test_what_is_imported_is_never_looked_at_and_collecting_goes_on_afterwards():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
