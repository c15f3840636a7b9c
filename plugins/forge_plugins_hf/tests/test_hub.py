"""A model of the Hub by its name, from a server that speaks as the Hub does."""

import json
import os
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import transformers

COMMIT = "a" * 40
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


class Hub(BaseHTTPRequestHandler):
    def __init__(self, folder, asked, *given):
        self.folder, self.asked = folder, asked
        super().__init__(*given)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append(path)
        files = {file.name: file for file in self.folder.iterdir()}
        files |= {"original/a.safetensors": self.folder / "consolidated.safetensors"}
        name = path.removeprefix(f"/acme/small/resolve/{COMMIT}/")
        if path == "/api/models/acme/small/revision/main":
            self.say_json({"id": "acme/small", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
        elif path == f"/api/models/acme/small/tree/{COMMIT}":
            sizes = {name: file.stat().st_size for name, file in files.items()}
            self.say_json([{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()])
        elif name in files:
            self.say(files[name].read_bytes(), ETag=f'"{name}"')
        else:
            self.say(b"{}", 404, **{"X-Error-Code": "RepoNotFound"})

    def say_json(self, value):
        self.say(json.dumps(value).encode())

    def say(self, body, code=200, **headers):
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    config = transformers.LlamaConfig(**SHAPE, vocab_size=64, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "there")
    (tmp_path / "there/pytorch_model.bin").write_text("pickled")
    (tmp_path / "there/consolidated.safetensors").write_text("the same weights for another program")
    asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, tmp_path / "there", asked))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


@pytest.fixture
def convert(tmp_path):
    """From a process of its own, as the library reads its settings when it is imported."""

    def run(name, **settings):
        command = [sys.executable, "-m", "forge_core", "convert", name, "--to", "forge", "--out", "ours"]
        environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1", **settings}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)

    return run


def test_a_model_is_downloaded_by_its_name_without_pickled_weights(hub, convert, tmp_path):
    endpoint, asked = hub

    done = convert("acme/small", HF_ENDPOINT=endpoint)

    assert done.returncode == 0, done.stderr
    assert "wrote ours/checkpoint: LlamaForCausalLM" in done.stdout
    assert not [path for path in asked if path.endswith((".bin", "consolidated.safetensors", "original/a.safetensors"))]
    assert [path for path in asked if path.endswith("/model.safetensors")]
    assert (tmp_path / "ours/train.toml").exists()


def test_a_model_with_pickled_weights_only_is_refused_as_such(hub, convert, tmp_path):
    (tmp_path / "there/model.safetensors").unlink()
    (tmp_path / "there/pytorch_model.bin").rename(tmp_path / "there/pytorch_model-00001-of-00002.bin")

    done = convert("acme/small", HF_ENDPOINT=hub[0])

    assert done.returncode == 2
    assert "error: acme/small has pickled weights, which can run code when they are read" in done.stderr
    assert not [path for path in hub[1] if path.endswith(".bin")]
    again = convert("acme/small", HF_HUB_OFFLINE="1")
    assert "give the folder of a downloaded model" in again.stderr


@pytest.mark.nightly
def test_a_model_that_the_hub_does_not_give_is_named_with_what_to_do(hub, convert):
    unknown = convert("acme/unknown", HF_ENDPOINT=hub[0])
    offline = convert("acme/small", HF_HUB_OFFLINE="1")

    for done, name in ((unknown, "acme/unknown"), (offline, "acme/small")):
        assert done.returncode == 2
        assert f"error: {name} is no folder here, and the Hugging Face Hub does not give it: " in done.stderr
        assert f"`hf download {name} --local-dir FOLDER`" in done.stderr


@pytest.mark.nightly
def test_a_path_is_not_looked_for_on_the_hub(hub, convert, tmp_path):
    (tmp_path / "models").mkdir()

    done = convert("models/small", HF_ENDPOINT=hub[0])

    assert done.returncode == 2
    assert "cannot read models/small/config.json" in done.stderr
    assert hub[1] == []
