"""Skills for assistants: their front matter, their commands, the files that they name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from doc_pages import DOCS, ROOT, commands, files, not_said, type_in, write_text
from forge_core.cli import main
from forge_core.registry.hookspecs import ForgeSpecs

SKILLS = sorted(ROOT.glob("skills/*/SKILL.md"))
ELSEWHERE = {
    r"^python3 -m venv|^pip install": "tests/outsider installs wheels in an environment of its own",
    r"^forge submit(?!.*--print)": "the tests of forge-plugins-slurm have a Slurm",
    r"^forge sweep .*--sweep optimizer.name(?!.*--dry-run)": "tests/docs/test_how_to.py has the same grid",
    r"FOLDER|runs/own": "text of the reader; tests/docs/test_how_to.py has such a folder",
    r"^pytest my_router.py": "tests/test_new.py tests what forge new writes",
    r"^cd my-router": "tests/test_new.py installs and trains what forge new writes",
}
"""What is not typed here, by pattern, and who does it."""
BY_NIGHT = ("choose-a-layout", "write-a-study")
"""Skills whose commands are those of how-to pages and of the tests of plans and sweeps."""
TYPED = [
    pytest.param(path, id=name, marks=pytest.mark.nightly if name in BY_NIGHT else ())
    for path in SKILLS
    for name in [path.parent.name]
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What skills speak of: ``c.toml`` with its run, and one that has failed."""
    folder = tmp_path_factory.mktemp("project")
    write_text(folder)
    (folder / "c.toml").write_text(files("docs/how-to/index.md")["c.toml"], encoding="utf-8")
    assert type_in("forge run c.toml", folder)[0] == 0
    assert type_in("forge run c.toml run.name=bad optimizer.lr=1e9", folder)[0] == 4
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("skill", TYPED)
def test_the_commands_of_a_skill_work_and_say_what_it_shows(skill, project, tmp_path):
    folder = Path(shutil.copytree(project, tmp_path / "project", symlinks=True))
    wrong = []
    for command, shown in commands(skill.relative_to(ROOT).as_posix()):
        if any(re.search(pattern, command) for pattern in ELSEWHERE):
            continue
        code, said = type_in(command, folder)
        if command.startswith("forge new config"):
            _read_less(folder / f"{command.split()[-1]}.toml")
        if code != 0 or (missing := not_said(shown, said)):
            wrong.append(f"{command}: exit code {code}; not said: {[] if code else missing}; said:\n{said}")
    assert not wrong, "\n".join(wrong)


def _read_less(config: Path) -> None:
    """Of Python's own library a few files: all are 20 MB, which each start would read."""
    text = config.read_text(encoding="utf-8")
    assert '"**/*.py"' in text
    config.write_text(text.replace('"**/*.py"', '"**/c*.py"'), encoding="utf-8")


@pytest.mark.parametrize("skill", SKILLS, ids=lambda path: path.parent.name)
def test_a_skill_says_its_name_and_when_it_is_for(skill):
    text = skill.read_text(encoding="utf-8")
    front = dict(line.split(": ", 1) for line in text.split("---\n")[1].splitlines())

    assert set(front) == {"name", "description"}
    assert front["name"] == skill.parent.name
    assert re.fullmatch(r"Use when [^.]{40,}\.", front["description"])
    assert len(text) < 8_000


def test_there_is_a_skill_for_each_task_that_is_asked_for():
    assert [path.parent.name for path in SKILLS] == [
        *("add-a-component", "choose-a-layout", "describe-a-cluster", "diagnose-a-run", "explain-the-architecture"),
        *("install-and-verify", "launch-on-slurm", "write-a-study"),
    ]


@pytest.mark.parametrize("page", [*SKILLS, ROOT / "AGENTS.md"], ids=lambda path: path.parent.name)
def test_the_files_and_skills_that_are_named_are_there(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:docs|forge_core|tests|skills|configs|benchmarks|plugins)/[\w/.-]*)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    for skill in re.findall(r"skills? `([a-z-]+)`", text):
        assert (ROOT / "skills" / skill / "SKILL.md").exists(), skill


def test_the_skill_about_components_has_every_kind_and_what_forge_new_takes(capsys):
    text = (ROOT / "skills/add-a-component/SKILL.md").read_text(encoding="utf-8")
    pages = set(re.findall(r"`docs/hooks/(forge_\w+)\.md`", text))
    assert pages == {path.stem for path in DOCS.glob("hooks/forge_*.md")}
    assert {name for name in vars(ForgeSpecs) if name.startswith("forge_")} <= pages

    assert main(["new", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    kinds = re.search(r"Kinds: (.*?)\. And config", said)[1].split(", ")
    assert sorted(re.findall(r"\| `(\w+)` \|$", text, re.M)) == sorted(kinds)


def test_agents_are_told_the_skills():
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`skills/([a-z-]+)/SKILL.md`", text)) == {path.parent.name for path in SKILLS}
