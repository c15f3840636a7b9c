"""Execute a notebook and keep what its cells print and show: ``python docs/notebooks/execute.py routing.ipynb``.

It needs no Jupyter, and neither does the test that executes every notebook.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any


def execute(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of its cells, which run one after the other in its folder.

    Raises:
        Exception: what a cell raises.
    """
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    sys.path.insert(0, str(path.parent))
    with contextlib.chdir(path.parent):
        for number, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), start=1):
            cell["outputs"] = _run("".join(cell["source"]), f"{path.name}, cell {number}", namespace)
            cell["execution_count"] = number
            for output in cell["outputs"]:
                if output["output_type"] == "execute_result":
                    output["execution_count"] = number
    return notebook


def _run(source: str, where: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """A cell's outputs: what it prints, and the value of the expression that it ends with."""
    body = ast.parse(source, where).body
    last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), where, "exec"), namespace)
        value = None if last is None else eval(compile(last, where, "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None:
        outputs.append({"output_type": "execute_result", "metadata": {}, "data": _shown(value)})
    return outputs


def _shown(value: Any) -> dict[str, str]:
    if hasattr(value, "_repr_svg_"):
        return {"image/svg+xml": value._repr_svg_()}
    if hasattr(value, "savefig"):  # a figure of matplotlib
        drawn = io.StringIO()
        value.savefig(drawn, format="svg", dpi=100)
        return {"image/svg+xml": drawn.getvalue()}
    return {"text/plain": repr(value)}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in sys.argv[1:]:
        file = Path(name).resolve()
        file.write_text(json.dumps(execute(file), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
