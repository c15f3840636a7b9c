"""Commands that print tables fit terminals of any width, say the same in a pipe, and heed ``NO_COLOR``."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import pytest

import fork_server

CONFIG = """
[run]
name = "demo"
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 2
max_seq_len = 16
[data]
name = "text_files"
path = "text.txt"
[train]
steps = 2
seq_len = 16
batch_size = 1
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
[checkpoint]
interval = 1
"""
TABLES = {
    "plugins": "forge-plugins-monitor",
    "plugins --kind router": "sigmoid_topk",
    "plugins show optimizer adamw": "weight_decay",
    "config --origins c.toml": "optimizer.weight_decay",
    "checkpoint list runs/demo": "whole",
    "checkpoint show runs/demo": "tensors",
    "runs": "demo",
    "runs runs/demo": "demo",
    "explain runs/demo": "report",
    "docs": "forge_routers",
    "docs exit-codes": "rank",
    "doctor runs": "Python",
    "plan c.toml --world-size 2": "activations",
    "sites runs/demo": "blocks",
    "lens runs/demo --prompt ab": "site",
    "sweep c.toml --sweep optimizer.lr=1e-3,2e-3 run.dir=studies": "optimizer.lr",
}
"""Commands, each with a word of its table."""
BY_DAY = ("plugins", "runs", "plan")
"""Of each way to draw a table, one; but for that which trains."""
COMMANDS = [
    pytest.param(one, marks=() if one.partition(" c.toml")[0] in BY_DAY else pytest.mark.nightly) for one in TABLES
]
CHANGES = ("docs exit-codes", "plugins", "doctor runs", "runs", "runs runs/demo", [*TABLES][-1])
"""Those with times in them, or that are drawn for a terminal."""
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)(?:;\d+)*m")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x1b\x07]*(?:\x07|\x1b\\)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration and a run of it."""
    folder = tmp_path_factory.mktemp("terminals")
    (folder / "c.toml").write_text(CONFIG)
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    for overrides in ([], ["run.name=another", "train.seed=5"]):
        assert "done" in piped(f"run c.toml {' '.join(overrides)}", folder)
    return folder


def start(command: str, folder: Path, out: int, **variables: str):
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    return fork_server.Popen(
        [sys.executable, "-m", "forge_core", *command.split()],
        cwd=folder,
        env={**environment, "TERM": "xterm-256color", **variables},
        stdin=fork_server.subprocess.DEVNULL,
        stdout=out,
        stderr=fork_server.subprocess.DEVNULL,
    )


def piped(command: str, folder: Path) -> str:
    process = start(command, folder, fork_server.subprocess.PIPE)
    out, _ = process.communicate()
    return out.decode()


def in_terminal(command: str, folder: Path, width: int, **variables: str) -> str:
    """What a terminal of this width is sent."""
    terminal, process_side = pty.openpty()
    fcntl.ioctl(process_side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    process = start(command, folder, process_side, **variables)
    os.close(process_side)
    sent = b""
    try:
        while block := os.read(terminal, 65_536):
            sent += block
    except OSError:  # so it ends on Linux
        pass
    os.close(terminal)
    process.wait()
    return sent.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_table_fits_a_narrow_terminal_and_nothing_of_it_is_cut_off(folder, command):
    shown = CONTROL.sub("", in_terminal(command, folder, 40))

    assert TABLES[command] in shown
    lines = [line for line in shown.splitlines() if not line.startswith("next, ")]  # a command to be copied
    assert [line for line in lines if len(line) > 40 and max(map(len, line.split())) <= 36] == []
    assert "…" not in shown.replace(" …", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_gets_the_whole_table_a_line_a_row_and_no_control_characters(folder, command):
    shown = piped(command, folder)

    assert "\x1b" not in shown
    assert TABLES[command] in shown
    wide = CONTROL.sub("", in_terminal(command, folder, 400))
    if (
        command not in ("docs exit-codes", "plugins", "doctor runs", "runs", "runs runs/demo")
        and "sweep" not in command
    ):
        assert shown.split() == wide.split()  # those have times, or are drawn


@pytest.mark.parametrize("command", COMMANDS)
def test_no_color_is_heeded(folder, command):
    assert not COLOUR.search(in_terminal(command, folder, 80, NO_COLOR="1"))


def test_there_is_colour_where_nobody_minds(folder):
    with (folder / "runs/demo/events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "failed", "step": 2}) + "\n")
    (folder / "runs/demo/checkpoints/step_00000002").rename(folder / "runs/demo/checkpoints/.aside")
    try:
        assert COLOUR.search(in_terminal("runs", folder, 80))
        assert not COLOUR.search(in_terminal("runs", folder, 80, NO_COLOR="1"))
    finally:
        (folder / "runs/demo/checkpoints/.aside").rename(folder / "runs/demo/checkpoints/step_00000002")
    assert COLOUR.search(in_terminal("doctor runs", folder, 80))
