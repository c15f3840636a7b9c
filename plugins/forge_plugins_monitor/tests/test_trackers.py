"""Each tracker with the real package, offline; what they wrote is read by the package itself."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import wandb
from mlflow import MlflowClient
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from forge_core.cli import main
from forge_core.errors import ConfigError, ForgeError
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_testing.tracker import TrackerConformance
from parity_matrix import launch

JOB = {"run": {"name": "first"}, "optimizer": {"name": "adamw", "betas": [0.9, 0.95]}}


@pytest.fixture(autouse=True)
def nothing_is_sent(monkeypatch) -> None:
    for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    file = tmp_path / "map.png"
    Image.new("RGB", (4, 3), (255, 0, 0)).save(file)
    return file


class TestTensorBoard(TrackerConformance):
    component = "forge-plugins-monitor:tensorboard"

    def written(self, tmp_path: Path) -> EventAccumulator:
        return EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"tensors": 0}).Reload()

    def test_the_curves_are_there_with_the_job_and_the_versions(self, tmp_path, picture) -> None:
        tracker = self.start(tmp_path, JOB)
        tracker.log(1, {"loss": 3.5, "lr": 1e-3})
        tracker.log(2, {"loss": 3.25, "lr": 5e-4})
        tracker.log(2, {"eval/loss": 3.0})
        tracker.log_series(2, {"load/blocks.0": [1.0, 2.0, float("nan")], "load/blocks.1": [float("inf")]})
        tracker.log_figure(2, "map", picture)
        tracker.close("completed")

        written = self.written(tmp_path)

        assert [(one.step, one.value) for one in written.Scalars("loss")] == [(1, 3.5), (2, 3.25)]
        assert [(one.step, one.value) for one in written.Scalars("eval/loss")] == [(2, 3.0)]
        (histogram,) = written.Histograms("load/blocks.0")
        assert (histogram.step, histogram.histogram_value.num, histogram.histogram_value.sum) == (2, 2, 3.0)
        assert written.Tags()["histograms"] == ["load/blocks.0"]
        (image,) = written.Images("map")
        assert (image.step, image.width, image.height) == (2, 4, 3)
        job = written.Tensors("job/text_summary")[0].tensor_proto.string_val[0].decode()
        assert json.loads(job) == JOB
        assert b"forge-plugins-monitor" in written.Tensors("versions/text_summary")[0].tensor_proto.string_val[0]

    def test_what_a_resumed_run_does_again_is_taken_back(self, tmp_path) -> None:
        first = self.start(tmp_path)
        first.log(1, {"loss": 3.5})
        state = dict(first.state())
        first.log(2, {"loss": 9.0})
        first.log(3, {"loss": 9.0})
        first.close("failed")

        second = self.start(tmp_path)
        second.load_state(state, 1)
        second.log(2, {"loss": 3.25})
        second.close("completed")

        assert [(one.step, one.value) for one in self.written(tmp_path).Scalars("loss")] == [(1, 3.5), (2, 3.25)]

    def test_what_a_run_that_goes_back_does_again_is_taken_back(self, tmp_path) -> None:
        tracker = self.start(tmp_path)
        for step, loss in ((1, 3.5), (2, 9.0), (3, 9.0), (2, 3.25), (3, 3.0), (3, 2.75)):
            tracker.log(step, {"loss": loss})
        tracker.close("completed")

        values = [(one.step, one.value) for one in self.written(tmp_path).Scalars("loss")]
        assert values == [(1, 3.5), (2, 3.25), (3, 2.75)]


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of a file of wandb's: after 7 bytes of its own a log of LevelDB's, whose records have a checksum of 4
    bytes, a length of 2 and a kind (whole, first, middle, last part), and do not cross a border of 32 KiB."""
    place, record = 7, b""
    while place + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, place + 4)
        if kind == 0 or 32768 - place % 32768 < 7:  # what is left of a block
            place += 32768 - place % 32768
            continue
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


class TestWandb(TrackerConformance):
    component = "forge-plugins-monitor:wandb"
    config: ClassVar = {"mode": "offline", "project": "tests", "tags": ["small"]}

    def written(self, tmp_path: Path) -> list[list[wandb_internal_pb2.Record]]:
        """The records of each start. A process of wandb's writes them, perhaps after the tracker is closed."""
        files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
        deadline = time.monotonic() + 60
        while True:
            logs = [leveldb_log(file.read_bytes()) for file in files]
            starts = [[wandb_internal_pb2.Record.FromString(data) for data in log] for log in logs]
            is_whole = all(any(one.HasField("exit") for one in records) for records in starts)
            if is_whole or time.monotonic() > deadline:
                return starts
            time.sleep(0.1)

    def test_the_curves_are_there_with_the_job_and_the_versions(self, tmp_path, picture) -> None:
        tracker = self.start(tmp_path, JOB)
        tracker.log(1, {"loss": 3.5})
        tracker.log(1, {"eval/loss": 3.0})
        tracker.log_series(1, {"load/blocks.0": [1.0, 2.0, float("nan")]})
        tracker.log_figure(1, "map", picture)
        tracker.close("failed")

        (records,) = self.written(tmp_path)

        (run,) = [one.run for one in records if one.HasField("run")]
        assert (run.run_id, run.project, run.display_name) == (tracker.state()["id"], "tests", "conformance")
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["job"] == JOB
        assert config["versions"].keys() >= {"forge-core", "forge-plugins-monitor", "torch"}
        lines = [
            {(item.nested_key or [item.key])[0]: json.loads(item.value_json) for item in one.history.item}
            for one in records
            if one.HasField("history")
        ]
        assert [(line["step"], line["loss"]) for line in lines if "loss" in line] == [(1, 3.5)]
        assert [(line["step"], line["eval/loss"]) for line in lines if "eval/loss" in line] == [(1, 3.0)]
        assert any("load/blocks.0" in line for line in lines)
        assert any("map" in line for line in lines)
        assert [one.exit.exit_code for one in records if one.HasField("exit")] == [1]

    def test_a_resumed_run_is_the_same_one(self, tmp_path) -> None:
        first = self.start(tmp_path)
        first.log(1, {"loss": 3.5})
        state = json.loads(json.dumps(first.state()))
        first.close("stopped")
        second = self.start(tmp_path)
        second.load_state(state, 1)
        second.log(2, {"loss": 3.0})
        second.close("completed")

        ids = [record.run.run_id for records in self.written(tmp_path) for record in records if record.HasField("run")]
        assert ids == [state["id"]] * 2

    def test_a_run_without_a_login_hears_so_before_its_first_step(self, tmp_path, online) -> None:
        with pytest.raises(ConfigError, match=r'wandb login, set WANDB_API_KEY, or set mode = "offline" and send'):
            online.start(tmp_path)

    @pytest.mark.parametrize("mode", ["online", "offline"])
    @pytest.mark.parametrize("place", ["variable", "file"])
    def test_a_login_is_found_wherever_wandb_looks_for_one(self, tmp_path, online, monkeypatch, mode, place) -> None:
        key = "0" * 40
        (tmp_path / "netrc").write_text(f"machine 127.0.0.1:9 login user password {key}\n")
        monkeypatch.setenv("WANDB_MODE", mode)
        monkeypatch.setenv(*(("WANDB_API_KEY", key) if place == "variable" else ("NETRC", str(tmp_path / "netrc"))))

        online.start(tmp_path).close("completed")

        assert wandb.setup().settings.mode == mode

    @pytest.fixture
    def online(self, monkeypatch) -> Iterator["TestWandb"]:
        """With a server that is not there, and nothing known from earlier runs."""
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        monkeypatch.setattr(type(self), "config", {"mode": "online"})
        wandb.teardown()
        yield self
        wandb.teardown()


class TestMlflow(TrackerConformance):
    component = "forge-plugins-monitor:mlflow"

    @pytest.fixture(autouse=True)
    def _store(self, tmp_path, monkeypatch, nothing_is_sent) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())

    def written(self, experiment="forge"):
        client = MlflowClient()
        return client, client.search_runs([client.get_experiment_by_name(experiment).experiment_id])

    def test_the_curves_are_there_with_the_job_and_the_versions(self, tmp_path, picture) -> None:
        tracker = self.start(tmp_path, JOB)
        tracker.log(1, {"loss": 3.5, "grad_norm/pp0": 1.0})
        tracker.log(2, {"loss": 3.25, "grad_norm/pp0": 1.0})
        tracker.log(2, {"eval/loss": 3.0})
        tracker.log_figure(2, "map", picture)
        tracker.close("completed")

        client, (run,) = self.written()

        assert (run.info.run_name, run.info.status) == ("conformance", "FINISHED")
        history = client.get_metric_history(run.info.run_id, "loss")
        assert [(one.step, one.value) for one in history] == [(1, 3.5), (2, 3.25)]
        assert run.data.metrics == {"loss": 3.25, "grad_norm/pp0": 1.0, "eval/loss": 3.0}
        assert run.data.params["optimizer.betas"] == "[0.9, 0.95]"
        assert run.data.tags["version.forge-plugins-monitor"]
        job = Path(client.download_artifacts(run.info.run_id, "job.json", str(tmp_path)))
        assert json.loads(job.read_text()) == JOB
        assert [one.path for one in client.list_artifacts(run.info.run_id, "figures/map/step_00000002")] == [
            "figures/map/step_00000002/map.png"
        ]

    def test_a_resumed_run_is_the_same_one(self, tmp_path) -> None:
        first = self.start(tmp_path)
        first.log(1, {"loss": 3.5})
        state = json.loads(json.dumps(first.state()))
        first.close("stopped")
        assert [run.info.status for run in self.written()[1]] == ["KILLED"]
        second = self.start(tmp_path)
        second.load_state(state, 1)
        second.log(2, {"loss": 3.0})
        second.close("failed")

        client, (run,) = self.written()
        assert (run.info.run_id, run.info.status) == (state["id"], "FAILED")
        assert [one.step for one in client.get_metric_history(run.info.run_id, "loss")] == [1, 2]

    def test_a_job_of_many_keys_is_recorded(self, tmp_path) -> None:
        tracker = self.start(tmp_path, {"many": {f"key{n}": "x" * 1000 for n in range(250)}})
        tracker.log(1, {"loss": 3.5})
        tracker.close("completed")

        (run,) = self.written()[1]
        assert len(run.data.params) == 250
        assert set(run.data.params.values()) == {"x" * 500}


@pytest.mark.parametrize("folder", ["/elsewhere", "../x", ""])
def test_a_folder_outside_of_the_run_is_refused(tmp_path, capsys, folder) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f'[[trackers]]\nname = "tensorboard"\ndir = "{folder}"\n')

    assert main(["validate", str(job)]) == 2
    assert "trackers[0].dir: must be a folder within the run's directory" in capsys.readouterr().err


def test_two_event_writers_of_one_folder_are_found_at_validation_and_named() -> None:
    """TensorBoard draws the two as one curve."""

    def load(*folders: str) -> None:
        trackers = ", ".join(f"{{name='tensorboard', dir='{folder}'}}" for folder in folders)
        load_job(launch.JOB, ["callbacks=[]", f"trackers=[{trackers}]"], catalog=discover(), world_size=1)

    load("a", "b", "a/b")
    with pytest.raises(ForgeError, match=r"trackers\[2\]\.dir: trackers\[1\] writes into './b' as well") as found:
        load("a", "b", "./b")
    assert str(found.value).count("writes into") == 1
