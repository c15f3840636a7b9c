"""Write preference pairs about Python's standard library, made of its docstrings: ``python docstring_pairs.py OUT``.

Of the two answers to a question, the docstring is chosen, and its words in an order by chance are rejected.
"""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from pathlib import Path

from docstring_chats import chats

_ONE_IN = 4
"""A part of the questions, which a machine of two cores measures in seconds."""


def main(out: Path) -> None:
    """Write a pair a line."""
    chance = random.Random(0)
    pairs = []
    for question, answer in list(chats(Path(sysconfig.get_path("stdlib"))))[::_ONE_IN]:
        words = answer["content"].split()
        chance.shuffle(words)
        rejected = {**answer, "content": " ".join(words)}
        if rejected != answer:
            pairs.append({"prompt": [question], "chosen": [answer], "rejected": [rejected]})
    out.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    print(f"{out}: {len(pairs):,} pairs")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
