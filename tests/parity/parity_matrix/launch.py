"""Many runs of one small job, one after the other in one launch: starting processes costs more than a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import torch
from PIL import Image
from torch.distributed import TCPStore

import fork_server
from forge_core.checkpoint.store import open_checkpoint
from parity_matrix.probe import Seen, seen_by

JOB = Path(__file__).with_name("job.toml")
"""What is trained, unless a work says otherwise."""
_CRASHES = {-signal.SIGSEGV, -signal.SIGABRT}
"""Exit codes of a process that an error in compiled code has ended."""


@attrs.frozen
class Work:
    """One run, or one more leg of it."""

    name: str
    """The run's."""
    ranks: int
    settings: Sequence[str] = ()
    """Overrides of ``job.toml``."""
    resumes: str | None = attrs.field(default=None, kw_only=True)
    """Another run, whose checkpoints this one begins with."""
    resumes_at: int | None = attrs.field(default=None, kw_only=True)
    """The step of that run at which it begins, by default its last one: a kill after that step would leave no more."""
    dry_run: bool = attrs.field(default=False, kw_only=True)
    refused: bool = attrs.field(default=False, kw_only=True)
    """It must end with exit code 2."""


class Launcher:
    """A folder with text to train on, and the runs of ``job.toml`` in it."""

    def __init__(
        self,
        folder: Path,
        python: str | Path = sys.executable,
        *,
        settings: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            folder: empty.
            python: the interpreter of the ranks, of another environment maybe.
            settings: overrides of every run.
            environment: variables of the ranks, beside this process's.
        """
        self._folder = folder
        self._python = python
        self._settings = settings
        self._environment = environment or {}
        _write_texts(folder)
        _write_chats(folder)
        _write_pictures(folder / "pictures")
        _write_distribution(folder / "site")
        self.failures: dict[str, str] = {}
        """What became of works that did not end as they should, by name."""
        self.crashes: dict[str, str] = {}
        """What was said by works that a signal of compiled code has ended once, by name."""

    def launch(self, works: Sequence[Work], *, timeout: float = 3000) -> str:
        """Do the works in their order, over gloo; ranks that a work does not need sit it out.

        A work that fails takes its processes along; the rest is done by a new launch. One whose process a signal of
        compiled code has ended is done once more: in three suites two runs ended so, most likely as the supervisor
        walked frames that torch's compiler had freed, which it does no more. ``crashes`` has it, and so has the end of
        the suite's output.

        Args:
            timeout: seconds for all of them.

        Returns:
            What rank 0 printed.
        """
        deadline = time.monotonic() + timeout
        left, said = [*works], ""
        while left := self._possible(left):
            failed = self._launch_once(left, deadline)
            said += self._log(0).read_text()
            if not failed:
                break
            error = self._words(failed)
            unfinished = self._first_unfinished(left)
            assert unfinished < len(left), f"all works are done, and then a rank failed: {error}"
            left = left[unfinished:]
            is_late = time.monotonic() > deadline
            if not is_late and _CRASHES & {*failed.values()} and self._is_new_crash(left[0].name, error):
                continue
            lost = left if is_late else left[:1]
            self.failures.update((work.name, error) for work in lost)
            left = left[len(lost) :]
        return said

    def _possible(self, works: Sequence[Work]) -> list[Work]:
        """Without those that have failed, and those that resume one that has."""
        for work in works:
            if work.resumes in self.failures:
                words = f"{work.resumes} failed, which it needs: {self.failures[work.resumes]}"
                self.failures.setdefault(work.name, words)
        return [work for work in works if work.name not in self.failures]

    def metrics(self, name: str) -> list[dict[str, float]]:
        """Lines of steps and of evaluations.

        Raises:
            AssertionError: the run failed; with what its rank said.
        """
        self._require(name)
        return [json.loads(line) for line in (self.run_dir(name) / "metrics.jsonl").read_text().splitlines()]

    def seen(self, name: str) -> list[Seen]:
        """What its ranks recorded, in their order."""
        self._require(name)
        files = (self.run_dir(name) / "seen").glob("*.json")
        return [seen_by(self.run_dir(name), rank) for rank in range(len(list(files)))]

    def saved(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of its newest checkpoint, by key."""
        self._require(name)
        checkpoint = open_checkpoint(self.run_dir(name) / "checkpoints" / "latest")
        entries = checkpoint.saved_tensors()
        tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
        checkpoint.load(tensors)
        return tensors

    def _require(self, name: str) -> None:
        assert name not in self.failures, self.failures[name]

    def run_dir(self, name: str) -> Path:
        return self._folder / "runs" / name

    def _launch_once(self, works: Sequence[Work], deadline: float) -> dict[int, int]:
        """Returns the exit codes of the ranks that failed."""
        for done in self._folder.glob("done.*"):
            done.unlink()
        # A store of its own for every group. They are here and not on the first ranks, so that no port is chosen
        # before somebody listens on it.
        stores = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in works]
        plan = self._folder / "plan.json"
        plan.write_text(
            json.dumps(
                [
                    {
                        **attrs.asdict(work),
                        "settings": [*work.settings, *self._settings, f"run.name={work.name}"],
                        "port": store.port,
                    }
                    for work, store in zip(works, stores, strict=True)
                ]
            )
        )
        with self._processes(max(work.ranks for work in works), plan) as processes:
            while not any(codes := [process.poll() for process in processes]) and None in codes:
                if time.monotonic() > deadline:
                    for process in processes:
                        process.send_signal(signal.SIGABRT)  # each leaves a traceback of where it was
                time.sleep(0.05)
            time.sleep(1)  # if one failed, the others may have something to say
            return {rank: code for rank, process in enumerate(processes) if (code := process.poll())}

    def _words(self, failed: Mapping[int, int]) -> str:
        """What the ranks with these exit codes said last, and where each thread was when a signal ended one."""
        stacks = {
            rank: "\n".join(path.read_text() for path in self._folder.glob(f"runs/*/stacks/fatal_rank_{rank}.txt"))
            for rank in failed
        }
        said = {rank: self._log(rank).read_text()[-8_000:] + stacks[rank] for rank in failed}
        return "\n".join(f"rank {rank}, exit code {code}: {said[rank]}" for rank, code in failed.items())

    def _is_new_crash(self, name: str, error: str) -> bool:
        """Note that a work has crashed, and clear what it has left; not if it did so before."""
        if name in self.crashes:
            return False
        self.crashes[name] = error
        shutil.rmtree(self.run_dir(name), ignore_errors=True)
        if machine := os.environ.get("FORGE_TEST_MACHINE"):
            with (Path(machine) / "crashes").open("a") as file:
                file.write(f"{name}, done once more:\n{error}\n")
        return True

    @contextmanager
    def _processes(self, ranks: int, plan: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
        here = Path(__file__).parent.parent
        given = {**os.environ, **self._environment}
        path = [str(self._folder / "site"), str(here), *filter(None, [given.get("PYTHONPATH")])]
        common = {
            **given,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "MASTER_ADDR": "localhost",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        processes = []
        try:
            for rank in range(ranks):
                with self._log(rank).open("wb") as log:
                    processes.append(
                        fork_server.Popen(
                            [self._python, "-m", "parity_matrix.rank", str(JOB), str(plan)],
                            cwd=self._folder,
                            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                            stdout=log,
                            stderr=subprocess.STDOUT,
                        )
                    )
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def _first_unfinished(self, works: Sequence[Work]) -> int:
        """Its number, or how many there are. Ranks may be at different works: none is done before the last of its ranks
        has done it."""
        done = [_lines(self._folder / f"done.{rank}") for rank in range(max(work.ranks for work in works))]
        left = (i for i, work in enumerate(works) if any(str(i) not in done[rank] for rank in range(work.ranks)))
        return next(left, len(works))

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _write_texts(folder: Path) -> None:
    """``long``: documents longer than a sample. ``short``: of 5 to 45 tokens, of which a sample of 32 has several."""
    lines = [[f"line {j} of file {i}: {(i * 7919 + j * 104729) % 9973}" for j in range(32)] for i in range(12)]
    words = [[str(j * 7919 % 97 + i) for j in range(2 + i * 31 % 13)] for i in range(240)]
    for name, texts in {"long": ["\n".join(one) for one in lines], "short": [" ".join(one) for one in words]}.items():
        (folder / name).mkdir()
        for i, text in enumerate(texts):
            (folder / name / f"{i}.txt").write_text(text)


def _write_chats(folder: Path) -> None:
    """Conversations of two to six turns, of 20 tokens to more than a sample has, with the template to write them by."""
    turns = "{% for one in messages %}<{{ one.role[0] }}>{{ one.content }}\\n{% endfor %}"
    (folder / "chat.jinja").write_text(turns + "{% if add_generation_prompt %}<a>{% endif %}")
    with (folder / "chats.jsonl").open("w") as chats:
        for i in range(120):
            said = [("user", str(i)), ("assistant", str(i * 7919 % 97))] * (1 + i % 3)
            chats.write(json.dumps({"messages": [{"role": who, "content": words} for who, words in said]}) + "\n")


def _write_pictures(folder: Path) -> None:
    """Conversations about none to three pictures of 16 × 16 pixels, of at most 32 tokens where each takes 4."""
    folder.mkdir()
    conversations = []
    for i in range(96):
        names = [f"{i}-{j}.png" for j in range(i % 5 % 4)]
        for j, name in enumerate(names):
            generator = torch.Generator().manual_seed(100 * i + j)
            pixels = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(folder / name)
        turns = [("human", "<image>" * len(names) + f"is {i}?"), ("gpt", f"it is {i * 7919 % 97}"[: 6 + i % 5])]
        said = [{"from": who, "value": text} for who, text in turns]
        conversations.append({"id": str(i), "image": names, "conversations": said})
    (folder / "data.json").write_text(json.dumps(conversations))


def _write_distribution(site: Path) -> None:
    """Makes a plugin of this package for those who have ``site`` on their path."""
    information = site / "parity_matrix-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: parity-matrix\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[forge.v1]\nparity-matrix = parity_matrix.plugin\n")
