"""Sizes of the wheels, and how long an environment takes to have them from an index that is a folder.

    python benchmarks/installation.py [--third-parties FOLDER] [--extras moe,testing] [--rounds N]

Torch, of hundreds of megabytes, is left out: the environment says that it has it. What else others have published is
downloaded into FOLDER first, which takes a network and is not timed; the installation has none. Without FOLDER, ours
alone are installed (``--no-deps``). Seconds, and multiples of ``python -m venv`` with pip on this machine.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES, MOST_SECONDS = 2_000_000, 60
PIP = ("-m", "pip", "--disable-pip-version-check", "-q")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--third-parties", type=Path, metavar="FOLDER")
    parser.add_argument("--extras", default="", help="of forge-train, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder, "index")
        run(sys.executable, ROOT / "release" / "distributions.py", "--out", index)
        tell_sizes(index)
        what = [f"forge-train[{options.extras}]"] if options.extras else ["forge-train"]
        if options.third_parties:
            run(sys.executable, *PIP, "download", "-d", options.third_parties, *third_parties(index))
            what += ["--find-links", str(options.third_parties)]
        else:
            what = ["--no-deps", *(str(wheel) for wheel in sorted(index.glob("*.whl")))]
        tell_seconds([installed(Path(folder, str(n)), index, what) for n in range(options.rounds)])


def tell_sizes(index: Path) -> None:
    sizes = {wheel.name.split("-")[0]: wheel.stat().st_size for wheel in sorted(index.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{name:28} {size / 1e3:8.1f} kB")
    total = sum(sizes.values())
    print(f"{f'{len(sizes)} wheels':28} {total / 1e3:8.1f} kB{'  above 2 MB' if total > MOST_BYTES else ''}")


def tell_seconds(rounds: list[tuple[float, float, int]]) -> None:
    environment, installation = (statistics.median(seconds) for seconds in list(zip(*rounds, strict=True))[:2])
    above = f"  above {MOST_SECONDS} s" if installation > MOST_SECONDS else ""
    print(f"an empty environment         {environment:8.1f} s")
    print(f"{rounds[0][2]} distributions in it      {installation:8.1f} s, {installation / environment:.1f}x{above}")


def third_parties(index: Path) -> list[str]:
    """What wheels of ours need of others, without torch."""
    lines = set()
    for wheel in index.glob("*.whl"):
        with ZipFile(wheel) as archive:
            (file,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            lines |= set(message_from_bytes(archive.read(file)).get_all("Requires-Dist") or ())
    return sorted(line for line in lines if "extra ==" not in line and not re.match(r"forge-|torch\b", line))


def installed(folder: Path, index: Path, what: list[str]) -> tuple[float, float, int]:
    """Seconds until there is an environment, seconds until ``what`` is in it, and how many distributions came."""
    start = time.perf_counter()
    run(sys.executable, "-m", "venv", folder)
    there = time.perf_counter()
    say_that_torch_is_there(folder)
    before = len(list(folder.rglob("*.dist-info")))
    begin = time.perf_counter()
    run(folder / "bin" / "python", *PIP, "install", "--no-index", "--find-links", index, *what)
    end = time.perf_counter()
    return there - start, end - begin, len(list(folder.rglob("*.dist-info"))) - before


def say_that_torch_is_there(folder: Path) -> None:
    (site,) = folder.glob("lib/python*/site-packages")
    version = metadata.version("torch").partition("+")[0]
    information = site / f"torch-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (information / "RECORD").touch()


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
