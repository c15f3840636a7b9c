"""What replicas cannot do is said before anything is started."""

import os
import sys

import pytest

import fork_server
from forge_core import __version__
from forge_core.cli import main
from forge_plugins_torchft.config import LIGHTHOUSE


@pytest.fixture(autouse=True)
def no_lighthouse(monkeypatch):
    monkeypatch.delenv(LIGHTHOUSE, raising=False)


def test_going_back_to_a_checkpoint_is_refused_at_validation(job):
    code, said = job.run("validate", "anomalies.give_up_after=3")

    assert code == 2
    assert "callbacks[0]: replicas cannot go back to a checkpoint together" in said
    assert "set anomalies.give_up_after = 0" in said


STREAMS = {
    "huggingface": '{name="huggingface_streaming", path="json", data_files="a.jsonl", streams=2}',
    "image_text": '{name="image_text_streaming", dataset={path="json", data_files="a.jsonl", split="train"}, '
    'format="turns", token_grid=[1, 1], processor={name="square", size=8}, streams=2}',
}


@pytest.mark.parametrize("indexed", STREAMS)
@pytest.mark.parametrize("command", [["validate"], ["replicas", "--replicas", "2"]], ids=["validate", "replicas"])
@pytest.mark.parametrize("is_mixed", [False, True], ids=["alone", "mixed"])
def test_streams_are_refused_at_validation(job, indexed, command, is_mixed):
    streams = STREAMS[indexed]
    mixture = f'{{name="mixture", sources=[{{name="own", weight=1.0, source={streams}}}]}}'
    code, said = job.run(command[0], *command[1:], f"data={mixture if is_mixed else streams}")

    assert code == 2
    assert f"callbacks[0]: replicas cannot share the streams of {indexed}_streaming: one that comes back" in said
    assert f"such as {indexed}\n" in said
    assert not (job.folder / "runs").exists()


def test_phases_of_the_data_are_refused_at_validation(job):
    """With two replicas, they began after half of the steps."""
    mixture = 'data={name="mixture", sources=[{name="own", weight=1, source={name="text_files", path="text"}}]}'

    code, said = job.run("validate", mixture, "phases=[{at=3, data={weights={own=2}}}]")

    assert code == 2
    assert "callbacks[0]: replicas cannot begin phases of the data with a step" in said


def test_a_job_that_does_not_name_the_callback_is_told_what_to_add(job):
    code, said = job.run("replicas", "--replicas", "2", "callbacks=[]")

    assert code == 2
    assert 'add\n\n[[callbacks]]\nname = "torchft"' in said


def test_a_run_without_a_lighthouse_is_told_how_to_get_one(job):
    code, said = job.run("run")

    assert code == 2
    assert "start them with forge replicas" in said
    assert not (job.folder / "runs").exists()


@pytest.mark.parametrize("url", ["node0:29510", "http://node0", "http://[::1", "http://node0:99999", "ftp://node0:1"])
def test_an_address_that_is_none_is_refused_before_a_replica_is_started(job, url, monkeypatch, capsys):
    monkeypatch.setenv(LIGHTHOUSE, url)
    key = ["validate", str(job.config), f"callbacks=[{{name='torchft', lighthouse='{url}'}}]"]
    named = ["replicas", str(job.config), "--replicas", "1", "--lighthouse", url]
    told = f"must be written as http://host:port, got {url!r}"

    for command in (key, named, ["run", str(job.config)]):
        assert main(command) == 2
        assert told in capsys.readouterr().err
    assert not (job.folder / "runs").exists()


@pytest.mark.parametrize("option", ["--port", "--heartbeat-timeout"])
def test_options_of_the_lighthouse_that_is_started_are_refused_beside_another_one(job, option, capsys):
    url = "http://node0:29510"
    command = ["replicas", str(job.config), "--replicas", "1", option, "29511"]
    told = f"{option} is for the lighthouse that is started here, and"

    for more, who in (
        (["--lighthouse", url], "--lighthouse"),
        ([f"callbacks.0.lighthouse={url}"], "lighthouse of"),
    ):
        assert main([*command, *more]) == 2
        assert f"{told} {who}" in capsys.readouterr().err
    assert not (job.folder / "runs").exists()


def test_a_lighthouse_whose_port_is_taken_is_said(job):
    import socket

    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, said = job.run("replicas", "--replicas", "1", "--port", port)

    assert code == 2
    assert f"no lighthouse can listen on [::]:{port}" in said


@pytest.mark.parametrize("command", [["validate"], ["replicas", "--replicas", "2"]])
def test_without_torchft_a_sentence_says_what_is_missing(job, command):
    hidden = (
        "import sys, importlib.machinery as m; find = m.PathFinder.find_spec;"
        "m.PathFinder.find_spec = lambda name, *a: None if name == 'torchft' else find(name, *a);"
        "from forge_core.__main__ import main; sys.exit(main())"
    )
    done = fork_server.run(
        [sys.executable, "-c", hidden, command[0], str(job.config), *command[1:]],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 2, done.stderr
    whose = f"forge-plugins-torchft {__version__}"
    assert f"callback 'torchft' of {whose} needs 'torchft', which cannot be imported" in done.stderr
    assert "Traceback" not in done.stderr
