"""What may stand at the cursor: commands, options, values, files, runs, settings; and what a shell makes of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forge_core.cli import forge, main
from forge_core.commands.invocation import Invocation
from forge_plugins_monitor.completion.words import Word, words_at

FORGE = Path(sys.executable).with_name("forge")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A configuration, a run, and other things in the working directory."""
    (tmp_path / "c.toml").write_text(
        'extends = "base.toml"\n[data]\nname = "text_files"\n[[callbacks]]\nname = "health"\n'
    )
    (tmp_path / "base.toml").write_text('[optimizer]\nname = "adamw"\nlr = 1e-3\n')
    (tmp_path / "broken.toml").write_text("[optimizer\n")
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".hidden.toml").touch()
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/job.toml").touch()
    (tmp_path / "runs/group/inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def texts(line: str) -> list[str]:
    return [word.text for word in words_at(line, forge, Invocation())]


def test_commands_and_their_options(folder):
    commands = texts("forge ")

    assert {"run", "plugins", "doctor", "completion"} <= set(commands)
    assert texts("forge val") == ["validate"]
    assert texts("forge checkpoint ver") == ["verify"]
    assert "--install-completion" in texts("forge --")
    assert texts("forge --disable-plugin forge-plugins-mon") == ["forge-plugins-monitor"]
    assert texts("forge --disable-plugin forge-plugins-plan repo") == ["report"]
    assert texts("forge run c.toml --dry") == ["--dry-run"]
    assert "-h" in texts("forge run -")
    assert texts("forge nonsense ") == []


def test_values_of_options(folder):
    assert texts("forge convert --to f") == ["forge"]
    assert texts("forge run c.toml --resume ") == ["auto", "never"]
    assert "router" in texts("forge plugins --kind r")
    assert "adamw" in texts("forge plugins show optimizer ada")
    assert texts("forge docs forge_rou") == ["forge_routers"]


def test_components_of_plugin_files_are_read_and_not_run(folder):
    text = """
from forge_core.api import component

raise SystemExit("it was run")

@component("optimizer", summary="a step by the sign")
class SignStep:
    def __init__(self, parameters, *, lr: float = 1e-3, damping: float = 0.0): ...

@component("scheduler", name="halves")
def half(*, total_steps, every: int = 10):
    \"\"\"Halves the rate.\"\"\"
"""
    (folder / "own.py").write_text(text)
    (folder / "f.toml").write_text('[plugins]\nfiles = ["own.py"]\n[scheduler]\nname = "halves"\n')

    assert texts("forge run f.toml optimizer.name=sign") == ["optimizer.name=sign_step"]
    assert texts("forge run f.toml scheduler.e") == ["scheduler.every="]
    assert texts("forge run c.toml optimizer.name=sign") == []
    (folder / "own.py").write_text("def (")
    assert texts("forge run f.toml optimizer.name=ada")


def test_files_and_runs(folder):
    assert texts("forge run ") == ["base.toml", "broken.toml", "c.toml", "runs/"]
    assert texts("forge run .h") == [".hidden.toml"]
    assert texts("forge checkpoint list ") == ["runs/demo", "runs/group/"]
    assert texts("forge report ru") == ["runs/"]
    assert texts("forge report runs/demo ") == ["runs/demo", "runs/group/"]
    assert texts("forge run nowhere/") == []


def test_keys_of_sections(folder):
    assert texts("forge run c.toml opt") == ["optimizer."]
    assert texts("forge validate c.toml --opt") == ["--optimizer."]
    assert texts("forge run c.toml train.batch") == ["train.batch_size="]
    assert texts("forge run c.toml nonsense.") == []
    (word,) = words_at("forge run c.toml train.seq", forge, Invocation())
    assert word == Word("train.seq_len=", "Tokens a sample.", is_open=True)


def test_keys_are_those_of_the_component_that_is_chosen_in_the_file_or_in_front(folder):
    assert texts("forge run c.toml optimizer.be") == ["optimizer.betas="]
    assert texts("forge run c.toml optimizer.name=muon optimizer.ne") == ["optimizer.nesterov="]
    assert texts("forge run c.toml --optimizer.name muon optimizer.be") == []
    assert texts("forge run c.toml optimizer=mu optimizer.") == ["optimizer.name="]  # not there; what stays is its name
    assert texts("forge run c.toml callbacks.0.gpu") == []
    assert "callbacks.0.interval=" in texts("forge run c.toml callbacks.0.")
    assert texts("forge run c.toml parallel.passes.fsdp.accu") == ["parallel.passes.fsdp.accumulate="]


def test_a_file_that_cannot_be_read_has_the_keys_of_every_file(folder):
    assert texts("forge run broken.toml optimizer.") == ["optimizer.name="]
    assert texts("forge run nowhere.toml train.steps") == ["train.steps="]


def test_values_of_keys(folder):
    assert {"adamw", "muon"} <= {text.partition("=")[2] for text in texts("forge run c.toml optimizer.name=")}
    assert texts("forge run c.toml optimizer=lio") == ["optimizer=lion"]
    assert texts("forge run c.toml train.precision=b") == ["train.precision=bf16", "train.precision=bf16_pure"]
    assert texts("forge run c.toml --data.document_mask=t") == ["--data.document_mask=true"]
    assert texts("forge run c.toml parallel.passes.fsdp=") == [
        "parallel.passes.fsdp=true",
        "parallel.passes.fsdp=false",
    ]
    assert texts("forge run c.toml train.steps=") == []
    assert texts("forge run c.toml --optimizer.name lio") == ["lion"]
    assert texts("forge sweep c.toml --sweep optimizer.l") == ["optimizer.lr="]


def in_bash(line: str, home: Path) -> list[str]:
    """What real bash, with the script that was installed there, gets for a line with the cursor at its end."""
    quoted = line.replace("'", "'\\''")
    program = f"""
        source "{home}/.bashrc" && complete -p forge > /dev/null || exit 9
        COMP_LINE='{quoted}' COMP_POINT={len(line)} COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
        _forge_completion "{FORGE}"
        printf '%s|\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return [one for one in done.stdout.split("|\n") if one]


def test_bash_is_given_what_it_puts_behind_the_last_character_that_breaks_words(folder, monkeypatch):
    home = folder / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert main(["--install-completion", "bash"]) == 0

    assert in_bash("forge plug", home) == ["plugins "]
    assert in_bash("forge run c.toml opt", home) == ["optimizer."]
    assert in_bash("forge run c.toml optimizer.name=adamw_", home) == ["adamw_8bit "]
    assert in_bash("forge run c.toml --optimizer.l", home) == ["--optimizer.lr="]
    assert in_bash("forge eval runs/de", home) == ["runs/demo "]


def test_zsh_and_fish_are_told_what_a_word_is(folder, capsys, monkeypatch):
    monkeypatch.setenv("COMP_LINE", "forge run c.toml train.seq")
    main(["completion", "zsh", "--words"])
    main(["completion", "fish", "--words"])

    zsh, fish = capsys.readouterr().out.splitlines()
    assert zsh.split("\t")[:2] == ["open", "train.seq_len="]
    assert fish.split("\t")[0] == "train.seq_len="
    assert len(fish.split("\t")[1]) > 5


@pytest.mark.parametrize(("shell", "startup"), [("bash", ".bashrc"), ("zsh", ".zshrc"), ("fish", None)])
def test_it_is_installed_once_and_says_where(tmp_path, capsys, monkeypatch, shell, startup):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    if startup:
        (tmp_path / startup).write_text("alias x=y")  # no line end

    assert main(["--install-completion"]) == main(["--install-completion", shell]) == 0

    said = capsys.readouterr().out
    (script,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != startup]
    assert said.count(f"wrote {script}") == 2
    assert said.count("next: open a new terminal") == 2
    if startup:
        assert (tmp_path / startup).read_text().splitlines() == [
            "alias x=y",
            f'source "{script}"  # forge --install-completion',
        ]
        assert f"{tmp_path / startup} reads it already" in said


def test_another_shell_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SHELL", raising=False)

    assert main(["--install-completion", "tcsh"]) == main(["--install-completion"]) == 2

    assert capsys.readouterr().err.splitlines() == [
        "error: forge does not complete in the shell 'tcsh'; name one of bash, zsh, fish",
        "error: $SHELL is not set; name one of bash, zsh, fish",
    ]
    assert [*tmp_path.iterdir()] == []


def test_a_home_that_cannot_be_written_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".local").touch()

    assert main(["--install-completion", "bash"]) == 2

    assert f"error: cannot write {tmp_path}/.local" in capsys.readouterr().err


def test_completion_without_the_package_says_what_to_install(capsys):
    assert main(["--disable-plugin", "forge-plugins-monitor", "completion"]) == 2
    assert "forge-plugins-monitor" in capsys.readouterr().err
