"""Forty ways to get it wrong. Each ends in a sentence that says where, what was expected and what was found, with exit
code 2 unless said otherwise, before anything is built or written.

Those of which another test knows more are named at the end.
"""

import ast
import re
import socket
import time
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_core.distributed.torchrun import refuse_split_brain
from forge_core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

# number: arguments, what is said; {folder} is that of the tiny job
SETTINGS = {
    "6 infinite": (["optimizer.lr=inf"], r"optimizer\.lr: expected a finite number, got the float inf"),
    "7 no steps": (["train.steps=0"], r"train\.steps: must be greater than 0, got 0"),
    "9 more key-value heads than heads": (["model.n_kv_heads=8"], r"n_kv_heads: must divide n_heads = 4, got 8"),
    "10 a global batch that cannot be": (
        ["train.global_batch_size=10"],
        r"train\.global_batch_size: must be a multiple of batch_size × data-parallel ranks = 4 × 1 = 4, got 10",
    ),
    "13 an interval below 0": (["checkpoint.interval=-1"], r"checkpoint\.interval: must be at least 0, got -1"),
    "14 keeping none": (["checkpoint.keep_last=0"], r"checkpoint\.keep_last: must be at least 1, got 0"),
    "15 a lead as long as the limit": (
        ['run.time_limit="2"', "run.stop_before_end=120"],
        r"run\.stop_before_end: 120 s is not below run\.time_limit = '2' = 120 s",
    ),
    "15 a limit shorter than the usual lead": (
        ['run.time_limit="1:30"'],
        r"run\.stop_before_end: 120 s, the default, is not below run\.time_limit = '1:30' = 90 s",
    ),
    "15 a save that may take longer than the lead": (
        ['run.time_limit="12:00:00"', "checkpoint.timeout=7200", "run.step_timeout=900"],
        r"checkpoint\.timeout: by 7200 s, a save may take longer than run\.stop_before_end = 120 s, after which run\.t",
    ),
    "15 a step that may take longer than the lead": (
        ['run.time_limit="12:00:00"', "run.stop_before_end=1000", "run.step_timeout=86400", "checkpoint.timeout=1800"],
        r"run\.step_timeout: by 86400 s, a step may take longer than run\.stop_before_end = 1000 s",
    ),
    "15 no time": (['run.time_limit="soon"'], r"run\.time_limit: 'soon' is not a time limit; write minutes"),
    "16 a timeout of nothing": (["run.step_timeout=0"], r"run\.step_timeout: must be greater than 0"),
    "22 a key that is none, from the command line": (
        ["optimizer.beta=3"],
        r"optimizer\.beta: unknown key; did you mean",
    ),
    "23 a GPU that is not there": (["run.device=cuda"], r"run\.device: cuda was asked for, but torch sees none"),
    "25 no such folder": (
        ["data.path={folder}/txet"],
        r"^error: data: path = .*: there is no file or folder .*/txet\. Did you mean .*/text\?",
    ),
    "25 no such folder to evaluate on": (
        ["eval.interval=1", 'eval.data={{name="text_files", path="{folder}/txet"}}'],
        r"^error: eval\.data: path = .*: there is no file or folder .*/txet\. Did you mean .*/text\?",
    ),
    "25 a pattern that fits nothing": (
        ["data.pattern=*.nothing"],
        r"has no files that match '\*\.nothing'; it has 12 ",
    ),
    "26 empty files": (
        ["data.path={folder}/empty", "data.validation=0"],
        r"text \(1 file\) is too small: .* there are 0",
    ),
    "33 a run with unfinished checkpoints only": (["--resume", "{folder}/half"], r"half holds no checkpoint"),
}

GROUP = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost",
}
ENVIRONMENTS = {
    "15 a Slurm job that ends before the lead": (
        {"SLURM_JOB_END_TIME": "SOON"},
        r"the end of the Slurm job is [78]\d s away, and the run stops run\.stop_before_end = 120 s before it",
    ),
    "20 a rank beyond the group": ({**GROUP, "RANK": "2"}, r"RANK=2 is not below WORLD_SIZE=2"),
    "20 a size without a rank": (
        {"WORLD_SIZE": "2"},
        r"WORLD_SIZE=2 is set, and RANK is not: start",
    ),
    "20 half a group": ({"RANK": "0"}, r"RANK is set, and WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not"),
    "20 a number in words": ({**GROUP, "WORLD_SIZE": "two"}, r"WORLD_SIZE must be a number, got 'two'"),
    "20 no port": ({**GROUP, "MASTER_PORT": "99999"}, r"MASTER_PORT=99999 is no port; the last one is 65535"),
    "20 another group than Slurm's": (
        {**GROUP, **SLURM},
        r"RANK=0 and WORLD_SIZE=2 in the environment, but for Slurm this is task SLURM_PROCID=1 of 2",
    ),
    "20 a number of ranks that a shell has kept": (
        {**SLURM, "WORLD_SIZE": "4"},
        r"WORLD_SIZE=4 in the environment, but for Slurm this is task SLURM_PROCID=1 of 2 .*: unset RANK and",
    ),
    "21 gloo's interface": ({"GLOO_SOCKET_IFNAME": "ib7"}, r"GLOO_SOCKET_IFNAME=ib7 names what is no .* has .*\blo\b"),
    "21 NCCL's interface": ({"NCCL_SOCKET_IFNAME": "ib7"}, r"NCCL_SOCKET_IFNAME=ib7 names what is no .* has .*\blo\b"),
}

FILES = {
    "1 missing": (None, r"tinny\.toml: there is no such file; did you mean .*/tiny\.toml\?"),
    "2 no TOML": (b"[run]\nname = \n", r"tinny\.toml:2: not valid TOML: .* \(column 8\)"),
    "3 empty": (b"", r"tinny\.toml: model: is required: name = \"\.\.\.\" naming a model; available: .*transformer"),
    "3 binary": (bytes(range(256)), r"tinny\.toml:\d+: the file is not UTF-8 text"),
    "22 a table twice": (b"[train]\nsteps = 1\n[train]\nsteps = 2\n", r"tinny\.toml:3: not valid TOML: .*twice"),
}

CODES = {"19": 5}
"""A port that another job has for now is no mistake of the configuration: starting again may help."""

ELSEWHERE = {
    4: "tests/system/test_bad_input.py::test_a_wrong_setting_is_refused_with_a_sentence",
    5: "tests/system/test_bad_input.py::test_a_wrong_setting_is_refused_with_a_sentence",
    8: "tests/system/test_bad_input.py::test_a_wrong_layout_is_refused_before_any_process_is_started",
    11: "tests/system/test_bad_input.py::test_a_wrong_setting_is_refused_with_a_sentence",
    12: "tests/system/test_bad_input.py::test_a_wrong_setting_is_refused_with_a_sentence",
    17: "tests/system/test_bad_input.py::test_a_directory_that_cannot_be_written_to",
    18: "tests/system/test_bad_input.py::test_a_second_process_in_the_same_run_is_refused",
    24: "tests/registry/test_discovery.py::test_a_plugin_that_breaks_the_contract_is_broken_and_says_where",
    27: "plugins/forge_plugins_data/tests/test_token_files.py::test_damaged_files_are_refused_with_a_sentence",
    28: "plugins/forge_plugins_data/tests/test_token_files.py::test_damaged_files_are_refused_with_a_sentence",
    29: "plugins/forge_plugins_data/tests/test_token_files.py::test_damaged_files_are_refused_with_a_sentence",
    30: "plugins/forge_plugins_data/tests/test_prepare.py::test_input_that_cannot_be_used_is_refused_with_a_sentence",
    31: "tests/system/test_bad_input.py::test_a_resume_on_other_data_is_refused",
    32: "tests/system/test_bad_input.py::test_all_ranks_fail_together_and_say_it_once",
    34: "tests/checkpoint/test_store.py::test_a_damaged_one_is_named_and_the_one_before_it_is_used",
    35: "tests/checkpoint/test_store.py::test_a_damaged_one_is_named_and_the_one_before_it_is_used",
    36: "tests/reliability/test_damage.py::"
    "test_a_hostile_checkpoint_executes_nothing_opens_nothing_outside_and_is_named",
    37: "tests/system/test_bad_input.py::test_a_resume_that_cannot_be_honoured_names_the_keys",
    38: "tests/checkpoint/test_store.py::test_what_does_not_fit_is_refused_by_name",
    39: "tests/system/test_bad_input.py::test_checkpoints_that_cannot_be_read_are_not_taken_for_a_fresh_start",
    40: "tests/system/test_run.py::test_a_finished_run_is_not_trained_again",
}


@pytest.fixture(scope="module")
def job(shared_tiny):
    """The tiny job, with some things beside it that cannot be used."""
    (shared_tiny.folder / "empty").mkdir()
    (shared_tiny.folder / "empty" / "a.txt").write_text("")
    (shared_tiny.folder / "half" / "checkpoints" / ".step_00000004.partial").mkdir(parents=True)
    return shared_tiny


@pytest.fixture
def says(job, capfd):
    """Run the command in this process; gives back its exit code and what it says."""

    def run(config, *arguments):
        before = {path: path.stat().st_mtime_ns for path in job.folder.rglob("*")}
        started = time.process_time()

        code = main(["run", str(config), *(argument.format(folder=job.folder) for argument in arguments)])

        assert time.process_time() - started < 5
        said = capfd.readouterr().err
        assert "Traceback" not in said
        assert "it is a bug" not in said
        assert {path: path.stat().st_mtime_ns for path in job.folder.rglob("*")} == before
        return code, said

    return run


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting(says, job, case):
    settings, sentence = SETTINGS[case]

    code, said = says(job.config, *settings)

    assert code == 2, said
    assert re.search(sentence, said), said


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_an_environment(says, job, monkeypatch, case):
    variables, sentence = ENVIRONMENTS[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, str(int(time.time()) + 80) if value == "SOON" else value)

    code, said = says(job.config)

    assert code == 2, said
    assert re.search(sentence, said), said


@pytest.mark.parametrize("case", FILES)
def test_a_file(says, job, case):
    content, sentence = FILES[case]
    config = job.folder / "tinny.toml"
    config.unlink(missing_ok=True)
    if content is not None:
        config.write_bytes(content)

    code, said = says(config)

    assert code == 2, said
    assert re.search(sentence, said), said


def test_3_a_directory(says, job):
    code, said = says(job.folder)

    assert (code, "this is a directory; name a TOML file" in said) == (2, True)


def test_16_signs_of_life_so_rare_that_a_group_falls_apart():
    command = ["python", "torchrun", "--nnodes=1:2", "--rdzv-conf=keep_alive_max_attempt=2"]

    with pytest.raises(ConfigError, match="keep_alive_max_attempt=2: with --nnodes 1:2 it must be at least 3"):
        refuse_split_brain({"TORCHELASTIC_RUN_ID": "1"}, command)


def test_19_a_port_that_is_taken(says, job, monkeypatch):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        for name, value in {**GROUP, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)

        code, said = says(job.config)

    assert code == CODES["19"], said
    assert f"cannot listen on localhost:{port}, because another program does; set another MASTER_PORT" in said


def test_all_forty_are_here_or_elsewhere():
    here = {int(case.split()[0]) for case in (*SETTINGS, *ENVIRONMENTS, *FILES)} | {3, 16, 19}

    assert here | ELSEWHERE.keys() == set(range(1, 41))
    for place in ELSEWHERE.values():
        path, _, name = place.partition("::")
        tests = {
            node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert name in tests, place
