"""Let ``constraints.txt`` ask for another torch than the one that the tests run with.

    python release/choose_torch.py 2.11      # its newest patch
    python release/choose_torch.py newest

For a checkout that tests one combination, as in CI; the change is not committed. torchao and Triton, which are built
for one torch, are not named then.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILT_FOR_TORCH = ("torchao", "triton")


def main(arguments: Sequence[str] | None = None, file: Path = ROOT / "constraints.txt") -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", help="two numbers, 2.11, or newest")
    wanted: str = parser.parse_args(arguments).torch
    if wanted != "newest" and not re.fullmatch(r"\d+\.\d+", wanted):
        parser.error(f"'{wanted}' is neither two numbers, such as 2.11, nor newest")
    kept = [line for line in file.read_text(encoding="utf-8").splitlines() if not of_torch(line)]
    if wanted != "newest":
        kept.append(f"torch=={wanted}.*")
    file.write_text("\n".join(kept) + "\n", encoding="utf-8")
    print(f"{file.name} lets pip take torch {wanted}")


def of_torch(line: str) -> bool:
    """Whether a constraint is that of torch, or of what is built for one."""
    return line.partition("==")[0] in ("torch", *BUILT_FOR_TORCH)


if __name__ == "__main__":
    main()
