"""Every layout against one process over ten steps, as a table: the matrix of ``tests/parity``.

Usage: ``python benchmarks/parity.py [PATTERN ...]``, such as ``'pp2*'``; no pattern is the whole matrix, with
checkpoints of each family of layouts resumed in each other one.
"""

from __future__ import annotations

import argparse
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "parity"))

from parity_matrix.cells import CELLS
from parity_matrix.launch import Launcher
from parity_matrix.matrix import EXCHANGES, Matrix


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("patterns", nargs="*")
    patterns = arguments.parse_args().patterns
    cells = [cell for cell in CELLS if not patterns or any(fnmatch(cell, pattern) for pattern in patterns)]
    exchanges = [] if patterns else EXCHANGES
    started = time.perf_counter()
    with TemporaryDirectory() as folder:
        matrix = Matrix(Launcher(Path(folder)))
        matrix.run(cells, exchanges)
        wrong = print_cells(matrix, cells)
        failed = {pair: found for pair in exchanges if (found := said(matrix.exchange_problems, *pair))}
    for (writer, reader), found in failed.items():
        print(f"written by {writer}, read by {reader}: {found[0]}")
    if exchanges:
        print(f"checkpoints: {len(exchanges) - len(failed)} of {len(exchanges)} exchanged bit for bit")
    print(f"{time.perf_counter() - started:.0f} s in all")
    return 1 if wrong or failed else 0


def print_cells(matrix: Matrix, cells: list[str]) -> int:
    """Returns how many are not as one process is."""
    print(f"{'cell':36} {'ranks':>5} {'loss':>9} {'grad_norm':>9} {'tolerance':>9}  verdict")
    wrong = 0
    for name in cells:
        cell, found = CELLS[name], said(matrix.problems, name)
        wrong += bool(found)
        try:
            loss, norm = (f"{matrix.difference(name, key):9.1e}" for key in ("loss", "grad_norm"))
        except AssertionError:  # it failed, as its verdict says
            loss = norm = f"{'–':>9}"
        verdict = f"{found[0]} ({len(found)} in all)" if found else "equal"
        print(f"{name:36} {cell.ranks:5} {loss} {norm} {cell.tolerance:9.0e}  {verdict}")
    return wrong


def said(compare, *names: str) -> list[str]:
    """What is wrong, a run that failed included."""
    try:
        return list(compare(*names))
    except AssertionError as error:
        lines = str(error).splitlines()
        return [next((line for line in reversed(lines) if "Error: " in line), lines[0])]


if __name__ == "__main__":
    sys.exit(main())
