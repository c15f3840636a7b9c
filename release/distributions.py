"""Every distribution of ours as a wheel and a source distribution, the same bytes from the same commit.

    python release/distributions.py [--out dist]

``SHA256SUMS`` is written beside them. Times in the archives are that of the last commit, or ``SOURCE_DATE_EPOCH`` where
it is set. Needs hatchling, and no network.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
from contextlib import chdir
from pathlib import Path

from hatchling.build import build_sdist, build_wheel

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [
    path.parent for pattern in (".", "plugins/*", "forge_*") for path in sorted(ROOT.glob(f"{pattern}/pyproject.toml"))
]
"""A distribution each; the core's is the first."""
ARCHIVES = ("*.whl", "*.tar.gz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="by default dist/ at the root")
    out: Path = parser.parse_args().out
    archives = build(out)
    sums = {archive: hashlib.sha256(archive.read_bytes()).hexdigest() for archive in archives}
    (out / "SHA256SUMS").write_text("".join(f"{digest}  {archive.name}\n" for archive, digest in sums.items()))
    for archive in archives:
        print(f"{archive.stat().st_size:9,} bytes  {archive.name}")
    wheels = sum(archive.stat().st_size for archive in archives if archive.suffix == ".whl")
    print(f"{wheels / 1e6:.2f} MB of wheels in {out}")


def build(out: Path, folders: list[Path] = FOLDERS) -> list[Path]:
    """The archives of ``folders``, written to ``out``; those of an earlier build are removed, as an upload takes all.

    Sets ``SOURCE_DATE_EPOCH`` for the rest of the process: hatchling reads it there.
    """
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for pattern in ARCHIVES:
        for stale in out.glob(pattern):
            stale.unlink()
    if "SOURCE_DATE_EPOCH" not in os.environ:
        os.environ["SOURCE_DATE_EPOCH"] = seconds_of_last_commit()
    for folder in folders:
        with chdir(folder):
            build_wheel(str(out))
            build_sdist(str(out))
    return sorted(path for pattern in ARCHIVES for path in out.glob(pattern))


def seconds_of_last_commit() -> str:
    """Since 1970, in UTC.

    Raises:
        SystemExit: this is no checkout.
    """
    git = ("git", "-C", str(ROOT), "log", "-1", "--format=%ct")
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit("there is no git checkout whose last commit gives archives their time: set SOURCE_DATE_EPOCH")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
