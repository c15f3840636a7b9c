import wave
from pathlib import Path

import numpy as np
import pytest
from mu_law_audio.config import MuLawAudioConfig
from mu_law_audio.data_source import MuLawAudio
from mu_law_audio.mu_law import decode, encode

from forge_core.errors import ConfigError
from forge_testing.data_source import DataSourceConformance


def write(file: Path, samples: np.ndarray, *, rate: int = 16_000, channels: int = 1, width: int = 2) -> None:
    with wave.open(str(file), "wb") as sound:
        sound.setparams((channels, width, rate, 0, "NONE", ""))
        sound.writeframes(samples.tobytes())


class WithSound(DataSourceConformance):
    component = "mu-law-audio:mu_law_audio"
    validation = 0.0

    @pytest.fixture(autouse=True)
    def _sound(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        for number in range(10):
            samples = rng.integers(-32_768, 32_768, size=rng.integers(2, 200), dtype=np.int16)
            write(tmp_path / f"{number}.wav", samples)
        self.config = {"path": str(tmp_path), "validation": self.validation}


class TestEverything(WithSound):
    holds_out = False


class TestHeldOut(WithSound):
    validation = 0.2


def test_levels_are_those_of_the_formula() -> None:
    """Of WaveNet, section 2.2, at every value that 16 bits have."""
    samples = np.arange(-32_768, 32_768, dtype=np.int32).astype(np.int16)

    x = [sample / 32_768 for sample in samples.tolist()]
    f = [np.sign(one) * np.log(1 + 255 * abs(one)) / np.log(256) for one in x]
    assert np.array_equal(encode(samples), [int((one + 1) / 2 * 255 + 0.5) for one in f])


def test_what_is_decoded_is_near() -> None:
    """By half a level, which grows with the sound."""
    sound = (20_000 * np.sin(np.arange(16_000) * 0.13)).astype(np.int16)

    error = decode(encode(sound)).astype(float) - sound

    assert 10 * np.log10((sound.astype(float) ** 2).mean() / (error**2).mean()) > 36
    assert np.array_equal(encode(decode(np.arange(256, dtype=np.uint8))), np.arange(256))


def test_channels_are_averaged_and_each_moment_is_learned_once(tmp_path: Path) -> None:
    left = np.arange(100, dtype=np.int16) * 100
    write(tmp_path / "a.wav", np.stack([left, left + 200], axis=1), channels=2)

    source = MuLawAudio(MuLawAudioConfig(path=str(tmp_path)), seq_len=16, split="all")
    batch = source.read(np.arange(len(source)))

    levels = encode((left + 100).astype(np.int16))
    assert np.array_equal(batch["targets"][batch["targets"] >= 0], levels[1:])
    assert np.array_equal(batch["tokens"].flatten()[:100], levels)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda file: write(file, np.zeros(9, np.int16), rate=8_000),
            "8000 samples a second, and data.rate says 16000",
        ),
        (lambda file: write(file, np.zeros(9, np.uint8), width=1), "samples of 8 bits; they must have 16"),
        (lambda file: write(file, np.zeros(1, np.int16)), "less than two moments"),
        (lambda file: file.write_bytes(b"RIFF, but no more"), "no WAV file with plain samples"),
        (lambda file: file.write_bytes(b""), "no WAV file with plain samples"),
        (lambda file: file.with_suffix(".mp3").touch(), "has no file"),
    ],
)
def test_files_that_are_no_sound_are_told(tmp_path: Path, damage, sentence: str) -> None:
    damage(tmp_path / "a.wav")

    with pytest.raises(ConfigError, match=sentence):
        MuLawAudio(MuLawAudioConfig(path=str(tmp_path)), seq_len=16, split="train")


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        MuLawAudio(MuLawAudioConfig(path=str(tmp_path / "nowhere")), seq_len=16, split="train")
