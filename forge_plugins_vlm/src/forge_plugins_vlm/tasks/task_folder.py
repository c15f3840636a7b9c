"""The folder of a task: pictures, conversations that name them, their texts alone, and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers

from forge_core.errors import ConfigError

END, PLACEHOLDER, UNKNOWN = "<eos>", "<image>", "<unk>"


class TaskFolder:
    """Writes a task.

    Raises:
        ConfigError: the folder has something in it.
    """

    def __init__(self, out: Path) -> None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"--out {out} is there already; remove it, or name another folder")
        out.mkdir(parents=True, exist_ok=True)
        self.out = out

    def picture(self, name: str, image: Image.Image) -> str:
        """Write a picture; returns its name for a conversation."""
        relative = f"images/{name}.png"
        path = self.out / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        return relative

    def llava(self, name: str, records: Sequence[tuple[str, list[str], str, str]]) -> None:
        """Write conversations as LLaVA has them: id, pictures, question, answer."""
        found = [
            {
                "id": key,
                "image": pictures[0] if len(pictures) == 1 else pictures,
                "conversations": [
                    {"from": "human", "value": " ".join(["<image>"] * len(pictures) + [question] * bool(question))},
                    {"from": "gpt", "value": answer},
                ],
            }
            for key, pictures, question, answer in records
        ]
        (self.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def messages(self, name: str, records: Iterable[dict[str, Any]]) -> None:
        """Write canonical samples as JSON Lines."""
        lines = "".join(f"{json.dumps(record)}\n" for record in records)
        (self.out / f"{name}.jsonl").write_text(lines, encoding="utf-8")

    def texts(self, name: str, texts: Sequence[str]) -> None:
        """Write texts alone, one a line."""
        (self.out / f"{name}.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")

    def words(self, texts: Iterable[str]) -> None:
        """Write a tokenizer whose tokens are the words of texts."""
        vocabulary = sorted({word for text in texts for word in text.split()})
        self._tokenizer(vocabulary, pre_tokenizers.WhitespaceSplit(), None)

    def letters(self, texts: Iterable[str]) -> None:
        """Write a tokenizer whose tokens are the characters of texts, and the space."""
        vocabulary = sorted({letter for text in texts for letter in text} | {" "})
        every = pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
        self._tokenizer(vocabulary, every, decoders.Fuse())

    def _tokenizer(self, vocabulary: Sequence[str], split: Any, decoder: Any) -> None:
        special = [END, PLACEHOLDER, UNKNOWN]
        ids = {token: number for number, token in enumerate([*special, *vocabulary])}
        tokenizer = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = split
        if decoder is not None:
            tokenizer.decoder = decoder
        tokenizer.add_special_tokens(special)
        tokenizer.save(str(self.out / "tokenizer.json"))
