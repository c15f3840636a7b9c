"""``forge submit``: what it refuses before anything is written, and what it asks Slurm for."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_slurm.cluster import read_cluster
from forge_plugins_studies.points import points_of
from forge_testing.json_output import json_of


@pytest.fixture
def forge(slurm_job, monkeypatch, capsys):
    """Runs a command in this process; returns exit code, output and errors."""
    monkeypatch.chdir(slurm_job.folder)
    monkeypatch.delenv("FORGE_CLUSTER", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main([arguments[0], *([str(slurm_job.config)] if arguments[0] == "submit" else []), *arguments[1:]])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def sbatch(tmp_path, monkeypatch, forge):
    """A stand-in that takes everything: what Slurm makes of it is looked at with a real one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"sbatch": "echo 12", "squeue": "cat queue 2>/dev/null; true"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


# -- cluster.toml


def test_cluster_facts_are_read_from_the_file_beside_the_configuration_and_changed_by_options(forge, slurm_job):
    (slurm_job.folder / "cluster.toml").write_text(
        'partition = "a100"\naccount = "lab"\ngpus_per_node = 8\ntime = "2-00:00:00"\ncpus_per_rank = 12\n'
        'modules = ["cuda/12.8"]\nsetup = ["ulimit -l unlimited"]\nsbatch_options = ["--exclusive"]\n'
        '[environment]\nNCCL_SOCKET_IFNAME = "ib 0"\n'
    )

    code, script, _ = forge("submit", "--nodes", "4", "--partition", "h100", "--print")

    assert code == 0
    for line in (
        "#SBATCH --partition=h100",
        "#SBATCH --account=lab",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --time=2-00:00:00",
        "#SBATCH --signal=USR1@120",
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "module load cuda/12.8",
        "ulimit -l unlimited",
        "export NCCL_SOCKET_IFNAME='ib 0'",
    ):
        assert line in script.splitlines(), script
    assert not (slurm_job.folder / "runs").exists()


def test_forge_cluster_names_another_file(forge, slurm_job, monkeypatch):
    (slurm_job.folder / "other.toml").write_text('time = "1:00:00"\npartition = "named"\n')
    monkeypatch.setenv("FORGE_CLUSTER", "other.toml")

    assert "--partition=named" in forge("submit", "--print")[1]
    monkeypatch.setenv("FORGE_CLUSTER", "missing.toml")
    code, _, error = forge("submit", "--print")
    assert (code, "missing.toml: there is no such file" in error) == (2, True), error


def test_a_signal_lead_that_sbatch_does_not_take_is_refused(tmp_path):
    """The most is 65535 s, also beside a time limit of a week."""
    file = tmp_path / "cluster.toml"
    file.write_text('time = "7-00:00:00"\nsignal_lead = 65536\n')

    with pytest.raises(ConfigError, match=r"cluster.toml:2: signal_lead: must be at most 65535, got 65536"):
        read_cluster(file)


def test_mistakes_in_cluster_toml_are_all_named_with_their_lines(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(
        'partion = "a100"\ngpus_per_node = "8"\ntime = "soon"\nlauncher = "mpirun"\nsignal_lead = 0\n'
        'sbatch_options = ["exclusive"]\n[environment]\nA = 1\n'
    )

    with pytest.raises(ConfigError) as caught:
        read_cluster(file)

    said = str(caught.value)
    assert f"{file}:1: partion: unknown key; did you mean 'partition'?" in said
    assert f'{file}:2: gpus_per_node: expected an integer, got the string "8"' in said
    assert f"{file}:4: launcher" in said
    assert f"{file}:8: environment.A: expected a string, got the integer 1" in said
    file.write_text('time = "soon"\nsignal_lead = 0\nsbatch_options = ["exclusive"]\n')
    with pytest.raises(ConfigError) as caught:
        read_cluster(file)
    said = str(caught.value)
    assert f"{file}:1: time: 'soon' is not a time limit; write minutes" in said
    assert f"{file}:2: signal_lead: must be greater than 0, got 0" in said
    assert f"{file}:3: sbatch_options" in said
    assert "must be written as --option=value, got 'exclusive'" in said


def test_what_would_break_the_lines_of_the_script_is_refused(forge, tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(
        'partition = "a\\nb"\naccount = "my lab"\nqos = ""\nsbatch_options = ["--exclusive\\r"]\n'
        '[environment]\n"A B" = "x"\n"1" = "x"\nGOOD_1 = "any\\nthing"\n'
    )

    with pytest.raises(ConfigError) as caught:
        read_cluster(file)

    said = str(caught.value)
    assert f"{file}:1: partition: must be a name without spaces, got 'a\\nb'" in said
    assert f"{file}:2: account: must be a name without spaces, got 'my lab'" in said
    assert f"{file}:3: qos: must be a name without spaces, got ''" in said
    assert f"{file}:4: sbatch_options" in said
    assert f"{file}:6: environment.A B: 'A B' cannot be the name of an environment variable" in said
    assert f"{file}:7: environment.1: '1' cannot be the name of an environment variable" in said
    assert "6 problems" in said
    file.write_text('[environment]\nBAD = "\\u0000"\n')
    with pytest.raises(ConfigError, match=r"environment\.BAD: cannot hold a null character"):
        read_cluster(file)
    file.unlink()
    code, _, error = forge("submit", "--time", "10", "--partition", "a b", "--print")
    assert (code, "'partition' must be a name without spaces, got 'a b'" in error) == (2, True), error


def test_the_patience_of_torchrun_is_the_clusters_unless_it_is_shorter_than_the_lead(forge, slurm_job):
    file = slurm_job.folder / "cluster.toml"
    for seconds, code, said in ((900, 0, "TIMEOUT=900"), (30, 2, "TIMEOUT = 30 s is below signal_lead = 120 s")):
        file.write_text(f'launcher = "torchrun"\nenvironment = {{TORCH_ELASTIC_SHUTDOWN_TIMEOUT = "{seconds}"}}\n')

        ended, out, error = forge("submit", "--time", "30", "--print")

        assert (ended, said in out + error, "TIMEOUT=3600" in out) == (code, True, False), out + error


def test_gpus_and_ranks_on_a_node_are_not_both_asked_for(forge, tmp_path):
    file = tmp_path / "both.toml"
    file.write_text("gpus_per_node = 8\nranks_per_node = 4\n")

    with pytest.raises(ConfigError, match="gpus_per_node = 8 and ranks_per_node = 4 are both given"):
        read_cluster(file)
    code, _, error = forge("submit", "--time", "10", "--gpus-per-node", "2", "--ranks-per-node", "4", "--print")
    assert (code, "are both given" in error) == (2, True)


# -- what is refused before anything is written


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--time is missing"),
        (["--time", "12h"], "'12h' is not a time limit"),
        (["--time", "1:00"], "signal_lead = 120 s is not below the time limit of 1:00 = 60 s"),
        (["--time", "12:00:00", "checkpoint.timeout=7200"], "a save may take longer than signal_lead = 120 s"),
        (
            ["--time", "12:00:00", "run.step_timeout=86400"],
            "by 86400 s, a step may take longer than signal_lead = 120 s",
        ),
        (["--time", "30", "optimizer.lr=fast"], "optimizer.lr: expected a number"),
        (["--time", "30", "--nodes", "3", "train.global_batch_size=8"], "must be a multiple of"),
        (["--time", "30", "--sweep", "optimizer.lr"], "expected key=value,value"),
        (["--time", "30", "--sweep", "optimizer.lr=1e-3,0"], "optimizer.lr=0: optimizer.lr"),
        (["--time", "30", "--node", "3"], "did you mean '--nodes'?"),
        (["--time", "30"], "there is no sbatch on this machine"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(forge, slurm_job, arguments, sentence):
    code, _, error = forge("submit", *arguments)

    assert code == 2
    assert sentence in error
    assert not list(slurm_job.folder.glob("runs/*/slurm/jobs.jsonl"))


def test_a_sweep_of_a_million_runs_is_refused_before_any_of_them_is_looked_at(forge, monkeypatch):
    monkeypatch.setattr("forge_plugins_studies.study.load_job", lambda *_, **__: pytest.fail("a job would be loaded"))
    thousand = ",".join(map(str, range(1, 1001)))

    code, _, error = forge(
        "submit", "--time", "30", "--sweep", f"train.seed={thousand}", "--sweep", f"train.x={thousand}"
    )

    assert code == 2
    assert "that makes 1,000,000 runs; at most 10,000 are started at once" in error


def test_data_that_this_machine_does_not_see_is_told(forge, sbatch):
    code, _, said = forge("submit", "--time", "30", "data.path=corpsu")

    assert code == 0
    assert "note: data: path = 'corpsu': there is no file or folder corpsu." in said
    assert "The nodes of the job must see it." in said


@pytest.mark.parametrize(("gloo", "notes"), [("", 1), (', GLOO_SOCKET_IFNAME = "ib0"', 0)])
def test_an_interface_that_is_named_to_nccl_and_not_to_gloo_is_told(forge, slurm_job, gloo, notes):
    (slurm_job.folder / "cluster.toml").write_text(f'environment = {{ NCCL_SOCKET_IFNAME = "ib0"{gloo} }}\n')

    code, _, said = forge("submit", "--time", "30", "--print")

    assert code == 0
    assert said.count("note: cluster.toml sets NCCL_SOCKET_IFNAME = 'ib0' and not GLOO_SOCKET_IFNAME") == notes


def test_a_run_that_has_a_job_in_the_queue_is_not_submitted_again(forge, sbatch, slurm_job):
    assert forge("submit", "--time", "30")[0] == 0
    before = (slurm_job.path("tiny") / "slurm/job.toml").read_text()
    (slurm_job.folder / "queue").write_text("11|RUNNING|n1\n12|PENDING|(Priority)\n")

    code, _, error = forge("submit", "--time", "30", "train.steps=7")

    assert code == 2
    assert "has job 12 already, which is pending; scancel 12" in error
    assert (slurm_job.path("tiny") / "slurm/job.toml").read_text() == before
    (slurm_job.folder / "queue").write_text("11|RUNNING|n1\n")
    assert forge("submit", "--time", "30", "train.steps=7")[0] == 0


def test_nothing_is_written_over_a_job_that_may_wait_while_the_queue_cannot_be_asked(
    forge, sbatch, slurm_job, tmp_path
):
    assert forge("submit", "--time", "30")[0] == 0
    before = (slurm_job.path("tiny") / "slurm/job.toml").read_text()
    (tmp_path / "bin/squeue").write_text("#!/bin/sh\nexit 1\n")

    code, _, error = forge("submit", "--time", "30", "train.steps=7")

    assert code == 1
    assert "squeue does not answer, so that it is not known whether job 12 of" in error
    assert (slurm_job.path("tiny") / "slurm/job.toml").read_text() == before


def test_submitting_and_looking_import_no_torch(slurm_job):
    program = (
        "import sys; from forge_core.cli import main\n"
        f"assert main(['submit', {str(slurm_job.config)!r}, '--time', '30', '--print']) == 0\n"
        f"assert main(['runs', {str(slurm_job.folder)!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


# -- what is written


def test_the_job_is_resolved_for_the_ranks_that_will_run_and_requeues_itself(forge, sbatch, slurm_job):
    code, said, _ = forge(
        "submit", "--time", "30", "--nodes", "2", "--ranks-per-node", "3", "train.global_batch_size=48"
    )

    assert code == 0
    assert said.startswith("submitted job 12: ")
    job = tomllib.loads((slurm_job.path("tiny") / "slurm/job.toml").read_text())
    assert job["callbacks"] == [{"name": "forge-plugins-slurm:slurm_requeue"}]
    assert job["train"]["global_batch_size"] == 48
    assert "48 × 32 tokens on 6 ranks" in said
    assert main(["validate", str(slurm_job.path("tiny") / "slurm/job.toml"), "--world-size", "6"]) == 0


def test_the_ranks_may_run_the_plugin_file_that_the_submitted_job_names(forge, sbatch, slurm_job, monkeypatch):
    monkeypatch.setenv("FORGE_TRUST_FILES", "")
    text = "from forge_core.api import component\n\n@component('scheduler', summary='s')\ndef half(*, total_steps):\n"
    text += "    return lambda step: 0.5\n"
    (slurm_job.folder / "half.py").write_text(text)

    code, _, error = forge("submit", "--time", "30", 'plugins.files=["half.py"]', "scheduler.name=half")

    assert code == 0, error
    slurm = next(slurm_job.folder.glob("runs/*/slurm"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (script,) = slurm.glob("*.sh")
    assert f"\nexport FORGE_TRUST_FILES={digest}\n" in script.read_text()
    assert load_job(slurm / "job.toml", catalog=discover).scheduler.provider == "file:half.py"


def test_programs_are_told_the_number_of_the_job_and_of_each_task(forge, sbatch, slurm_job):
    told = json_of("submit", str(slurm_job.config), "--time", "30", "--sweep", "optimizer.lr=1e-3,2e-3")

    assert told["job_id"] == "12"
    assert [one["job_id"] for one in told["runs"]] == ["12_0", "12_1"]
    assert all(Path(one["path"]).is_dir() and f"12_{n}" in one["log"] for n, one in enumerate(told["runs"]))
    assert Path(told["script"]).is_file()
    code, _, said = forge("submit", "--time", "30", "--print", "--json")
    assert code == 2
    assert "--json: has no effect with --print" in said


def test_a_callback_that_is_named_already_is_not_added_twice(forge, sbatch, slurm_job):
    forge("submit", "--time", "30", "callbacks=['slurm_requeue']")

    job = tomllib.loads((slurm_job.path("tiny") / "slurm/job.toml").read_text())
    assert job["callbacks"] == [{"name": "forge-plugins-slurm:slurm_requeue"}]


def test_a_sweep_is_an_array_with_a_run_for_each_combination(forge, sbatch, slurm_job):
    code, said, _ = forge("submit", "--time", "30", "--sweep", "optimizer.lr=1e-3,3e-4", "--sweep", "train.seed=1,2")

    assert code == 0
    assert "submitted job 12: 4 runs" in said
    names = [f"tiny-lr-{lr}-seed-{seed}" for lr in ("1e-3", "3e-4") for seed in (1, 2)]
    for task, name in enumerate(names):
        job = tomllib.loads((slurm_job.path(name) / "slurm/job.toml").read_text())
        assert job["run"]["name"] == name
        assert (job["optimizer"]["lr"], job["train"]["seed"]) == ((1e-3, 3e-4)[task // 2], task % 2 + 1)
        assert f'"job_id": "12_{task}"' in (slurm_job.path(name) / "slurm/jobs.jsonl").read_text()
    script = (slurm_job.folder / "runs/tiny-sweep/job.sh").read_text()
    assert "#SBATCH --array=0-3" in script
    chosen = script[script.index("runs=(") : script.index("job=${")]
    for task, name in enumerate(names):
        printed = subprocess.run(
            ["bash", "-c", f"SLURM_ARRAY_TASK_ID={task}\n{chosen}\necho $run"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert Path(printed.strip()) == slurm_job.path(name)


def test_sweeps_keep_values_with_commas_together_and_names_apart():
    points = points_of(["optimizer.betas=[0.9, 0.95],[0.9, 0.99]", 'data.path="a,b",c'])

    assert points[0].overrides == ("optimizer.betas=[0.9, 0.95]", 'data.path="a,b"')
    assert [point.suffix for point in points] == [
        "-betas-0.9_0.95-path-a_b",
        "-betas-0.9_0.95-path-c",
        "-betas-0.9_0.99-path-a_b",
        "-betas-0.9_0.99-path-c",
    ]
    assert points_of(["eval.interval=1", "metrics.interval=2"])[0].suffix == "-eval.interval-1-metrics.interval-2"
    for wrong, why in [
        (["a.b=1,1"], "would both be called"),
        (["a.b=1", "a.b=2"], "swept twice"),
        (["a.b=1,"], "expected"),
    ]:
        with pytest.raises(ConfigError, match=why):
            points_of(wrong)
    assert [point.overrides for point in points_of([])] == [()]


def test_spare_nodes_are_asked_for_and_no_rank_is_counted_on_them(forge, slurm_job):
    (slurm_job.folder / "cluster.toml").write_text('time = "1:00:00"\nspare_nodes = 2\nranks_per_node = 2\n')

    code, script, _ = forge("submit", "--nodes", "4", "--print")

    assert code == 0
    assert {"#SBATCH --nodes=6", "#SBATCH --no-kill"} <= set(script.splitlines())
    assert "--nodes=4 --ntasks=8 --ntasks-per-node=2" in script
    code, script, _ = forge("submit", "--nodes", "4", "--spare-nodes", "0", "--print")
    assert (code, "#SBATCH --nodes=4" in script, "--no-kill" in script) == (0, True, False)
    code, _, error = forge("submit", "--nodes", "4", "--launcher", "torchrun", "--print")
    assert (code, 'spare_nodes = 2 needs launcher = "srun", got "torchrun"' in error) == (2, True), error
