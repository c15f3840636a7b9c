"""Sound as tokens."""

import hashlib
import math
import wave
from pathlib import Path

import numpy as np

from forge_core.contracts.data_source import Split
from forge_core.contracts.loss import IGNORED
from forge_core.errors import ConfigError
from mu_law_audio.config import MuLawAudioConfig
from mu_law_audio.mu_law import LEVELS, encode


class MuLawAudio:
    """A file is a document, and gives as many samples as it takes to learn each of its moments once; the last one is
    filled up with silence. Channels are averaged. All sound is kept in memory, a byte a moment: an hour at 16 kHz takes
    58 MB.

    Raises:
        ConfigError: there is no such folder, no such file in it, or a file that is no sound in 16 bits at ``rate``.
    """

    tokenizer = None
    vocab_size = LEVELS

    def __init__(self, config: MuLawAudioConfig, /, *, seq_len: int, split: Split, **_: object) -> None:
        folder = Path(config.path).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"data.path: there is no folder {folder}")
        files = _part(sorted(folder.glob(config.pattern)), config, split)
        documents = [_levels(file, config.rate) for file in files]
        decisive = hashlib.sha256(repr((config.rate, seq_len, split)).encode())
        for document in documents:
            decisive.update(len(document).to_bytes(8, "big") + document.tobytes())
        self.fingerprint = decisive.hexdigest()
        self.seq_len = seq_len
        self._documents = documents
        self._where = [
            (number, start)
            for number, document in enumerate(documents)
            for start in range(0, len(document) - 1, seq_len)
        ]

    def __len__(self) -> int:
        return len(self._where)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        tokens = np.full((len(indices), self.seq_len), LEVELS // 2, dtype=np.int64)
        targets = np.full((len(indices), self.seq_len), IGNORED, dtype=np.int64)
        for row, index in enumerate(indices):
            number, start = self._where[index]
            heard = self._documents[number][start : start + self.seq_len + 1]
            tokens[row, : len(heard)] = heard[: self.seq_len]
            targets[row, : len(heard) - 1] = heard[1:]
        return {"tokens": tokens, "targets": targets}


def _part(files: list[Path], config: MuLawAudioConfig, split: Split) -> list[Path]:
    kept = len(files) - math.ceil(config.validation * len(files))
    part = {"train": files[:kept], "validation": files[kept:], "all": files}[split]
    if not files:
        raise ConfigError(f"data.pattern: {config.path} has no file {config.pattern}")
    if not part:
        raise ConfigError(f"data.validation = {config.validation} leaves no file of {len(files)} for {split}")
    return part


def _levels(file: Path, rate: int) -> np.ndarray:
    try:
        with wave.open(str(file)) as sound:
            channels, width, found = sound.getnchannels(), sound.getsampwidth(), sound.getframerate()
            samples = sound.readframes(sound.getnframes())
    except (wave.Error, EOFError) as error:
        raise ConfigError(f"{file} is no WAV file with plain samples ({str(error) or 'it ends too early'})") from None
    if width != 2:
        raise ConfigError(f"{file} has samples of {8 * width} bits; they must have 16")
    if found != rate:
        raise ConfigError(
            f"{file} has {found} samples a second, and data.rate says {rate}: resample it, or change the key"
        )
    frames = np.frombuffer(samples, dtype="<i2").reshape(-1, channels)
    if len(frames) < 2:
        raise ConfigError(f"{file} has less than two moments")
    return encode(frames.mean(axis=1).round().astype(np.int16))
