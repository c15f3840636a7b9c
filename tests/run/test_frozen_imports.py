import signal
import subprocess
import sys

import pytest

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


INTERRUPTED = """
import os, signal, threading
from forge_core.run.process import frozen_imports

def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()

signal.signal(signal.SIGINT, HANDLER)
threading.Thread(target=lambda: frozen_imports().__enter__()).start()
try:
    with frozen_imports():
        PLACE
        print("imported", flush=True)
    press_ctrl_c()
except KeyboardInterrupt:
    print("dropped")
"""


@pytest.mark.parametrize(
    ("handler", "place", "code", "said"),
    [
        ("signal.default_int_handler", "press_ctrl_c()", -signal.SIGINT, ""),  # as torch drops it while it is loaded
        ("signal.default_int_handler", "", 0, "imported\ndropped\n"),
        ("lambda *_: os._exit(7)", "press_ctrl_c()", 7, ""),
        ("signal.SIG_IGN", "os.kill(os.getpid(), signal.SIGINT); os._exit(8)", 8, ""),
    ],
    ids=["while it imports", "afterwards", "with a handler", "ignored"],
)
def test_ctrl_c_ends_a_process_while_it_imports(handler, place, code, said):
    script = INTERRUPTED.replace("HANDLER", handler).replace("PLACE", place)

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (code, said, "")
