"""``forge doctor``: what it finds on this machine, and what it makes of what it finds elsewhere."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch

import forge_core
import fork_server
from forge_core.cli import main
from forge_core.contracts.check import CheckContext, Finding
from forge_core.registry.discovery import discover
from forge_plugins_monitor.doctor import gloo, gpus, network, plugins, software, storage
from forge_plugins_monitor.doctor.together import merged
from forge_plugins_monitor.plugin import forge_checks
from forge_testing.json_output import json_of
from rank_ports import free_ports


@pytest.fixture
def doctor(capsys, monkeypatch, tmp_path):
    """Runs the command in a folder of its own; gives back its exit code and the findings by subject."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main(["doctor", "--json", *arguments])
        return code, {one["subject"]: one for one in json.loads(capsys.readouterr().out)}

    return run


@pytest.fixture
def without_processes(monkeypatch):
    """What takes seconds is looked at once."""
    monkeypatch.setattr("forge_plugins_monitor.doctor.gloo.look", lambda _: ())


@pytest.mark.usefixtures("aborting_teardown")
def test_everything_is_looked_at_and_nothing_is_left_behind(monkeypatch, tmp_path):
    """Where processes abort as torch is unloaded, too."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    found = {one["subject"]: one for one in json_of("doctor", "runs/of/mine")}

    for subject in ("Python", "torch", "CUDA", "gloo", "interfaces", "run.dir", "disk speed", "renaming", "plugins"):
        assert found[subject]["state"] in ("fine", "warning"), found[subject]
    assert "two processes add 4 KiB in" in found["gloo"]["found"]
    assert "MiB/s" in found["disk speed"]["found"]
    assert list((tmp_path / "here").iterdir()) == []


def test_the_report_is_a_table_with_what_to_do(monkeypatch, capsys, tmp_path, without_processes):
    monkeypatch.setenv("OMP_NUM_THREADS", "1000")

    assert main(["doctor", str(tmp_path)]) == 0

    said = capsys.readouterr().out
    assert "cores" in said
    assert "→ set OMP_NUM_THREADS to at most" in said
    assert ", 0 wrong" in said.splitlines()[-1]
    assert all(line == line.rstrip() for line in said.splitlines())


@pytest.mark.parametrize(
    ("emulated", "state", "advice"), [(True, "warning", 'train.precision = "%s"'), (False, "fine", "")]
)
@pytest.mark.parametrize(("has_gpu", "device", "faster"), [(False, "CPU", "fp32"), (True, "GPU", "fp16")])
def test_a_machine_that_emulates_bf16_is_a_warning(
    tmp_path, monkeypatch, has_gpu, device, faster, emulated, state, advice
):
    monkeypatch.setattr("forge_core.distributed.mesh.emulates_bf16", lambda device: emulated)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)

    (found,) = [one for one in software.look(CheckContext(tmp_path, discover())) if one.subject == "bf16"]

    assert found.state == state
    assert found.found.startswith(f"this {device} ")
    assert (advice and advice % faster) in found.advice


@pytest.mark.skipif(sys.platform != "linux", reason="a place that not even root can write to: /proc")
def test_what_is_wrong_is_exit_code_2_and_the_rest_is_looked_at(doctor, without_processes):
    code, found = doctor("/proc/runs")

    assert code == 2
    assert found["run.dir"]["state"] == "wrong"
    assert "/proc" in found["run.dir"]["found"]
    assert found["plugins"]["state"] == "fine"


def test_gloo_that_does_not_work_is_found_out(doctor, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope")
    forked = SimpleNamespace(**{**vars(subprocess), "Popen": fork_server.Popen})
    monkeypatch.setattr(gloo, "subprocess", forked)

    code, found = doctor()

    assert code == 2
    assert found["gloo"]["state"] == "wrong"
    assert "nope" in found["gloo"]["found"]
    assert "GLOO_SOCKET_IFNAME=nope names what is no interface" in found["interfaces asked for"]["found"]


@pytest.mark.parametrize(("gloo_too", "states"), [(False, ["warning"]), (True, [])])
def test_an_interface_that_is_named_to_nccl_and_not_to_gloo_is_a_warning(tmp_path, monkeypatch, gloo_too, states):
    (_, name), *_ = socket.if_nameindex()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", name)
    if gloo_too:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)

    findings = network.look(CheckContext(tmp_path, discover()))

    found = [one for one in findings if one.subject == "interfaces asked for"]
    assert [one.state for one in found] == states
    assert all(f"NCCL_SOCKET_IFNAME={name}, and GLOO_SOCKET_IFNAME is not set" in one.found for one in found)


def test_checks_of_plugins_are_made_and_one_that_fails_is_a_finding(doctor, make_distribution, without_processes):
    make_distribution(
        "acme-checks",
        files={
            "acme_checks/plugin.py": """
                from forge_core.api import Check, hookimpl
                @hookimpl
                def forge_checks():
                    yield Check(name="good", summary="fine", run="acme_checks.checks:good")
                    yield Check(name="bad", summary="fails", run="acme_checks.checks:bad")
                """,
            "acme_checks/checks.py": """
                from forge_core.contracts.check import Finding
                def good(surroundings):
                    yield Finding("acme", "fine", f"{len(surroundings.catalog.plugins)} plugins")
                def bad(surroundings):
                    raise KeyError("oops")
                """,
        },
    )

    code, found = doctor()

    assert code == 2
    assert found["acme"]["state"] == "fine"
    assert (found["bad"]["state"], "KeyError: 'oops'" in found["bad"]["found"]) == ("wrong", True)
    assert "acme-checks" in found["bad"]["advice"]


def test_a_check_that_is_required_must_find_something_and_warn_of_nothing(doctor, make_distribution, without_processes):
    make_distribution(
        "acme-checks",
        files={
            "acme_checks/plugin.py": """
                from forge_core.api import Check, hookimpl
                @hookimpl
                def forge_checks():
                    for name in ("good", "poor", "absent"):
                        yield Check(name=name, summary="a second fan", run=f"acme_checks.checks:{name}")
                """,
            "acme_checks/checks.py": """
                from forge_core.contracts.check import Finding
                def good(surroundings):
                    yield Finding("acme", "fine", "it turns")
                def poor(surroundings):
                    yield Finding("acme", "fine", "it turns")
                    yield Finding("its noise", "warning", "60 dB", "clean it")
                def absent(surroundings):
                    return ()
                """,
        },
    )

    assert doctor("--require", "good")[0] == 0
    code, found = doctor("--require", "good", "--require", "poor")
    assert (code, found["its noise"]["state"], found["acme"]["state"]) == (2, "wrong", "fine")
    code, found = doctor("--require", "absent")
    assert (code, found["its noise"]["state"], found["absent"]["state"]) == (2, "warning", "wrong")
    assert found["absent"]["found"] == "this machine has nothing to look at: a second fan"
    assert found["absent"]["advice"] == "set it up, or leave out --require absent"


def test_the_nearest_check_is_named_for_one_that_is_not_there(capsys, tmp_path):
    assert main(["doctor", str(tmp_path), "--require", "gpu"]) == 2

    said = capsys.readouterr().err
    assert "--require: no check is named 'gpu'; there are gloo, gpus, huggingface, " in said
    assert said.rstrip().endswith("; did you mean 'gpus'?")


@pytest.mark.parametrize(
    ("name", "variable", "advice"), [("huggingface", "HF_TOKEN", "hf auth"), ("wandb", "WANDB_API_KEY", "wandb login")]
)
def test_logins_are_looked_at_where_they_are_required(
    doctor, monkeypatch, without_processes, nothing_known_to_wandb, name, variable, advice
):
    assert name not in doctor()[1]
    code, found = doctor("--require", name)
    assert (code, found[name]["state"], found[name]["found"]) == (2, "wrong", "this machine has no login")
    assert advice in found[name]["advice"]

    monkeypatch.setenv(variable, "0" * 40)
    code, found = doctor("--require", name)
    assert (code, found[name]["state"]) == (0, "fine")

    monkeypatch.setitem(sys.modules, "huggingface_hub" if name == "huggingface" else "wandb", None)
    monkeypatch.delitem(sys.modules, "forge_plugins_monitor.wandb_tracker", raising=False)
    assert doctor("--require", name)[1][name]["found"] == "its package is not installed"


@pytest.fixture
def nothing_known_to_wandb(monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wandb.teardown()
    yield
    wandb.teardown()


def test_a_broken_plugin_is_a_finding(doctor, make_distribution, without_processes):
    make_distribution("acme-broken", files={"acme_broken/plugin.py": "import no_such_module"})

    code, found = doctor()

    assert (code, found["acme-broken"]["state"]) == (2, "wrong")
    assert "no_such_module" in found["acme-broken"]["found"]


@pytest.mark.parametrize(
    ("needs", "old"),
    [
        ("forge-core>=99", "forge-core"),
        ("forge-core<0.0.1", "acme-other"),
        ("Forge_Core==99.*", "Forge_Core"),
        ("forge-plugins-optim>=99", "forge-plugins-optim"),
    ],
)
def test_a_core_or_a_plugin_that_does_not_go_with_it_is_a_finding(make_distribution, tmp_path, needs, old):
    """With which of the two to upgrade."""
    site = make_distribution("acme-other", files={"acme_other/plugin.py": ""})
    (information,) = site.glob("*.dist-info/METADATA")
    information.write_text(
        f"{information.read_text()}Requires-Dist: {needs}\nRequires-Dist: forge-core>=9; extra == 'new'\n"
    )

    (found,) = [one for one in plugins.look(CheckContext(tmp_path, discover())) if one.subject == "acme-other"]

    assert found.state == "wrong"
    assert found.found == f"1.0 needs {needs}, and {forge_core.__version__} is installed"
    assert found.advice == f"pip install --upgrade {old}"


def test_under_a_launcher_all_ranks_are_measured_and_each_host_is_looked_at_once(tmp_path):
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports()), "OMP_NUM_THREADS": "1"}
    ranks = [
        fork_server.Popen(
            [sys.executable, "-m", "forge_core", "doctor", "--json"],
            cwd=tmp_path,
            env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=200) for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0], said
    found = {one["subject"]: one for one in json.loads(said[0][0])}
    assert said[1][0] == ""
    assert found["ranks"]["found"] == f"2 on {socket.gethostname()} (2)"
    assert "64 MiB at" in found["all-reduce, CPU"]["found"]
    assert found["shared run.dir"]["state"] == "fine"
    assert [one["subject"] for one in json.loads(said[0][0])].count("disk speed") == 1
    assert list(tmp_path.iterdir()) == []


def test_hosts_are_named_where_they_differ():
    same, slow = Finding("Python", "fine", "3.12"), Finding("disk speed", "warning", "3 MiB/s", "buy another")

    assert merged([("a", [same]), ("b", [same, slow])]) == [same, attrs.evolve(slow, found="b: 3 MiB/s")]


def test_what_is_not_fine_needs_an_advice():
    with pytest.raises(ValueError, match="needs an advice"):
        Finding("disk", "warning", "full")


GPU = {
    "index": "0",
    "name": "NVIDIA H100 80GB HBM3",
    "driver_version": "570.86.15",
    "memory.total": "81559",
    "memory.used": "4",
    "ecc.errors.uncorrected.volatile.total": "0",
    "clocks_throttle_reasons.hw_slowdown": "Not Active",
    "temperature.gpu": "34",
}


@pytest.mark.parametrize(
    ("changes", "state", "said"),
    [
        ({}, "fine", "NVIDIA H100 80GB HBM3, 80 GiB, 0.0 in use, 34 °C"),
        ({"ecc.errors.uncorrected.volatile.total": "[N/A]"}, "fine", "H100"),
        ({"ecc.errors.uncorrected.volatile.total": "2"}, "wrong", "2 uncorrected memory errors"),
        ({"clocks_throttle_reasons.hw_slowdown": "Active"}, "warning", "slowed down by its hardware"),
        ({"memory.used": "40000"}, "warning", "39.1 in use"),
    ],
)
def test_the_health_of_a_gpu(changes, state, said):
    driver, gpu = gpus.findings([{**GPU, **changes}])

    assert driver.found == "570.86.15"
    assert (gpu.state, said in gpu.found) == (state, True), gpu


def test_gpus_of_different_kinds_are_named():
    *_, last = gpus.findings([GPU, {**GPU, "index": "1", "name": "NVIDIA A100"}])

    assert (last.subject, last.state) == ("GPUs", "warning")


def test_nvidia_smi_is_read_as_it_answers(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{', '.join(GPU.values())}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    assert gpus.ask() == [GPU]

    tool.write_text("#!/bin/sh\necho 'Unable to determine the device handle'; exit 9\n")
    assert gpus.ask() == []
    assert next(gpus.findings([])).state == "warning"


def test_torchrun_that_leaves_no_time_to_save_is_a_warning():
    torchrun = {"TORCHELASTIC_RUN_ID": "1"}

    assert list(network.launcher({})) == []
    (short,) = network.launcher(torchrun)
    (long,) = network.launcher({**torchrun, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600"})

    assert (short.state, long.state) == ("warning", "fine")
    assert "30 s after" in short.found


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "root / ext4 rw 0 0\ntmp /tmp tmpfs rw 0 0\nserver:/x /tmp/work nfs4 rw 0 0\nover /tmp/work lustre rw 0 0\n"
    )

    assert storage.file_system(Path("/tmp/work/runs"), mounts) == "lustre"
    assert storage.file_system(Path("/tmp/other"), mounts) == "tmpfs"
    assert storage.file_system(Path("/home"), mounts) == "ext4"
    assert storage.file_system(Path("/home"), tmp_path / "none") == ""


def test_a_disk_on_which_a_checkpoint_could_be_written_over_is_wrong(tmp_path, monkeypatch):
    rename = Path.rename

    def replacing(self, target):
        if Path(target).is_dir():
            import shutil

            shutil.rmtree(target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", replacing)

    found = {one.subject: one for one in storage.look(CheckContext(tmp_path, discover()))}

    assert found["renaming"].state == "wrong"


def test_every_check_of_the_core_can_be_loaded():
    from forge_core.registry.imports import load_reference

    for check in forge_checks():
        assert callable(load_reference(check.run, what=check.name, owner="forge-core"))


def test_init_without_a_plugin_that_writes_anything_says_so(monkeypatch, capsys, tmp_path, without_processes):
    monkeypatch.chdir(tmp_path)
    nobody = [
        f"--disable-plugin={plugin.distribution}"
        for plugin in discover().plugins
        if any(one.writes for one in plugin.checks)
    ]

    assert main([*nobody, "doctor", "--init"]) == 2

    assert "no installed plugin has a file of facts to write" in capsys.readouterr().err
