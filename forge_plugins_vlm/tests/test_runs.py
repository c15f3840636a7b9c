"""A run on drawn shapes: what its model says of images, by command and in evaluations, in every layout."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import forge_plugins_interp as interp
import fork_server
from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_core.train import metrics
from forge_plugins_inference import generation
from forge_plugins_interp.extraction import Request, extract
from forge_plugins_interp.reduction import Reduction
from forge_plugins_interp.session import Session, inputs_of
from forge_plugins_interp.store import Store
from forge_testing.json_output import json_of
from parity_matrix.cells import TRAININGS
from parity_matrix.launch import Launcher, Work

CONFIG = """
[run]
name = "shapes"
dir = "{folder}/runs"
[model]
name = "vision_language"
dim = 32
n_layers = 2
n_heads = 4
max_seq_len = 48
[model.encoder]
name = "conv_vit"
dim = 32
n_layers = 2
n_heads = 2
[data]
name = "image_text"
path = "{folder}/shapes/train.json"
format = "llava"
token_grid = [4, 4]
processor = {{name = "square", size = 32}}
tokenizer = {{name = "tokenizer_file", path = "{folder}/shapes/tokenizer.json"}}
[train]
steps = 30
seq_len = 24
batch_size = 16
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-2
[scheduler]
name = "constant"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With ``shapes``, and a run of thirty steps."""
    folder = tmp_path_factory.mktemp("vlm")
    drawn = ["vlm", "shapes", "--out", str(folder / "shapes"), "--train", "64", "--held-out", "8"]
    assert main(drawn) == 0
    (folder / "job.toml").write_text(CONFIG.format(folder=folder))
    assert main(["run", str(folder / "job.toml")]) == 0
    return folder


def generated(folder, capsys, *arguments):
    capsys.readouterr()
    code = main(["vlm", "generate", str(folder / "runs" / "shapes"), *arguments])
    said = capsys.readouterr()
    return code, said.out.splitlines(), said.err


def held_out(folder, number):
    return str(folder / "shapes" / "images" / "held_out" / f"{number:05}.png")


def test_images_are_captioned(folder, capsys):
    code, (caption,), _ = generated(folder, capsys, "--image", held_out(folder, 0))

    assert code == 0
    assert caption.startswith("a ")


def test_what_is_said_in_a_chat_ends_with_its_turn(folder, capsys, monkeypatch):
    """It went on to --max-new-tokens, where the template's turns do not end a document; later the words stopped there,
    and the model did not."""
    said = "{% for m in messages %}{{ m.content }} {{ 'circle circle ' if m.role == 'assistant' }}{% endfor %}"
    (folder / "chat.jinja").write_text(said, encoding="utf-8")
    keys = ["data.chat_template=true", f"data.tokenizer.chat_template={folder / 'chat.jinja'}", "run.name=chat"]
    assert main(["run", str(folder / "job.toml"), *keys]) == 0

    steps, of_model = [], generation.generate_steps

    def counted(*arguments, **keys):
        found = of_model(*arguments, **keys)
        with contextlib.closing(found):
            for step in found:
                steps.append(step)
                yield step

    monkeypatch.setattr(generation, "generate_steps", counted)
    capsys.readouterr()
    assert main(["vlm", "generate", str(folder / "runs" / "chat"), "--image", held_out(folder, 0)]) == 0
    caption = capsys.readouterr().out

    assert caption.startswith("a ")
    assert "circle circle" not in caption
    assert len(steps) == len(caption.split()) + 2


def test_the_likeliest_tokens_alone_are_sampled_from(folder, capsys):
    image = ["--image", held_out(folder, 0)]
    likeliest = generated(folder, capsys, *image)

    assert generated(folder, capsys, *image, "--temperature", "9", "--top-k", "1") == likeliest
    assert generated(folder, capsys, *image, "--temperature", "9") != likeliest


def test_averages_of_weights_are_sampled_from_unless_the_trained_ones_are_asked_for(folder, capsys):
    average = 'callbacks=[{name="ema", decay=0.9999}]'
    assert main(["run", str(folder / "job.toml"), "run.name=averaged", average]) == 0

    def said(run, *arguments):
        capsys.readouterr()
        assert main(["vlm", "generate", str(folder / "runs" / run), "--image", held_out(folder, 0), *arguments]) == 0
        return capsys.readouterr().out

    assert said("averaged") == said("averaged", "--weights", "evaluation") != said("shapes")
    assert said("averaged", "--weights", "training") == said("shapes")
    code, _, error = generated(folder, capsys, "--image", held_out(folder, 0), "--weights", "evaluation")
    assert code == 2
    assert "has the trained ones alone; use 'training', or leave it out" in error


def test_its_sites_are_listed_with_those_of_its_encoder(folder, capsys):
    run = str(folder / "runs" / "shapes")
    rows = {row["name"]: row for row in json_of("sites", run)}
    capsys.readouterr()
    assert main(["sites", run]) == 0
    shown = capsys.readouterr().out

    assert re.search(r"vision\.layers\.\{0–1\}\.mlp_post +\S+ × 16 × 128 +tile × patch × neuron", shown)
    assert rows["vision.layers.1.resid_post"]["dims"] == ["tile", "patch", "width"]
    assert rows["vision.layers.0.mlp_post"]["module"] == "vision.encoder.layers.0.down"


def test_positions_of_images_and_layers_of_the_encoder_are_extracted(folder, capsys, tmp_path):
    """A placeholder's text chooses the positions that images have; a layer of the encoder has a row a sample."""
    run, sites = str(folder / "runs" / "shapes"), "blocks.0.resid_post,vision.layers.*.resid_post,image_features"
    options = ["--samples", "5", f"data.path={folder}/shapes/held_out.json"]
    of_image, of_text = tmp_path / "image", tmp_path / "text"

    assert main(["extract", run, "--sites", sites, "--match", "<image>", "--out", str(of_image), *options]) == 0
    assert main(["extract", run, "--sites", sites, "--match", "(?!<image>).*", "--out", str(of_text), *options]) == 0

    image, text = Store(of_image), Store(of_text)
    assert image.columns["length"].tolist() == [16] * 5
    assert image.array("vision.layers.1.resid_post").shape == (5, 16, 32)
    with interp.open(run) as session, torch.no_grad(), session.observe(*sites.split(",")) as seen:
        source = session.open_data(options[-1:])
        batch = {name: torch.from_numpy(values) for name, values in source.read(np.arange(5)).items()}
        session.model(batch["tokens"], **inputs_of(source, batch))
    is_image = batch["image_slots"] >= 0
    for sample in range(5):
        assert image.positions(sample).tolist() == is_image[sample].nonzero()[:, 0].tolist()
        assert not is_image[sample, text.positions(sample)].any()
        assert torch.allclose(
            image.read("blocks.0.resid_post", sample), seen["blocks.0.resid_post"][sample, is_image[sample]], atol=1e-5
        )
        for site in ("vision.layers.0.resid_post", "image_features"):
            assert torch.allclose(image.read(site, sample), seen[site][sample], atol=1e-5)


@pytest.mark.parametrize(
    "layout", [["parallel.tp=2", "model.cut_encoder=true"], ["parallel.pp=2"], ["parallel.cp=2"]], ids=" ".join
)
def test_layers_of_the_encoder_are_extracted_alike_in_layouts(folder, tmp_path, layout):
    command = ["extract", str(folder / "runs" / "shapes"), "--sites", "vision.layers.*.*", "--samples", "5"]
    command.append(f"data.path={folder}/shapes/held_out.json")
    assert main([*command, "--out", str(tmp_path / "one")]) == 0
    on_two = [sys.executable, "-m", "forge_core", *command, "--out", str(tmp_path / "two"), "--nproc", "2", *layout]

    done = fork_server.run(on_two, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stderr
    one, two = Store(tmp_path / "one"), Store(tmp_path / "two")
    assert one.sites == two.sites
    assert len(one.sites) == 16
    for site in one.sites:
        wanted = one.array(site)
        assert torch.allclose(two.array(site), wanted, atol=1e-5 * float(wanted.abs().max())), site


class TwoImages:
    """A source whose third sample has its image twice, and which knows no more than what it reads."""

    fingerprint = "two"

    def __init__(self, source):
        self.source, self.entries = source, source.entries

    def __len__(self):
        return len(self.source)

    def read(self, indices):
        batch = self.source.read(indices)
        several = 1 + int(2 in indices)
        return batch | {"pixels": np.concatenate([batch["pixels"]] * several, axis=1)}


class TwoImagesUndescribed(TwoImages):
    """It does not even describe its entries."""

    def __init__(self, source):
        super().__init__(source)
        del self.entries


@pytest.mark.parametrize(
    ("kind", "sentence", "runs"),
    [
        (TwoImages, "sample 2 has 2 images or tiles;", False),
        (TwoImagesUndescribed, "have several images or tiles;", True),
    ],
)
def test_layers_of_the_encoder_with_several_images_a_sample_are_not_extracted(
    folder, tmp_path, monkeypatch, kind, sentence, runs
):
    """Nor does the model run, where the source describes what it reads."""
    if not runs:
        monkeypatch.setattr(Session, "run_batch", lambda *_: pytest.fail("the model ran"))
    with interp.open(folder / "runs" / "shapes") as session:
        source = kind(session.open_data([f"data.path={folder}/shapes/held_out.json"]))
        request = Request(out=tmp_path / "acts", sites=["vision.layers.1.resid_post"], reduction=Reduction())
        with pytest.raises(ConfigError, match=rf"site vision\.layers\.1\.resid_post: .* {sentence}"):
            extract(session, source, request, print)

    assert not (tmp_path / "acts").exists()


def test_a_path_freezes_the_layers_of_each_modality(folder, capsys):
    keys = ["run.name=mixture", "model.fusion.name=mixture_of_transformers", "train.steps=1"]
    assert main(["run", str(folder / "job.toml"), *keys]) == 0
    patch = ["patch", str(folder / "runs" / "mixture"), "--clean", "a red circle", "--corrupt", "a blue circle"]
    patch += ["--answers", "red,blue", "--from", "blocks.0.text.attn_out", "--to", "blocks.1.text.mlp_in", "--json"]
    capsys.readouterr()

    effects = []
    for frozen in ([], ["--freeze", "blocks.*.text.attn_out,blocks.*.text.mlp_out"], ["--freeze", ""]):
        assert main([*patch, *frozen]) == 0
        (place,) = json.loads(capsys.readouterr().out)["places"]
        effects.append(place["effect"])

    assert effects[0] == effects[1] != effects[2]


def test_attention_to_images_is_not_extracted_of_batches_with_more_and_fewer_of_them(folder, tmp_path):
    keys = ['model.fusion={name="cross_attention", layers=[1]}', "data.one_token_an_image=true", "train.steps=1"]
    assert main(["run", str(folder / "job.toml"), "run.name=looking", "train.batch_size=2", *keys]) == 0
    site = "blocks.1.looking.attn_pattern"
    with interp.open(folder / "runs" / "looking") as session:
        source = TwoImages(session.open_data([f"data.path={folder}/shapes/held_out.json"]))
        request = Request(out=tmp_path / "acts", sites=[site], reduction=Reduction())
        with pytest.raises(ConfigError, match=rf"{site}: .* head, image_token are 4 × 16 in the first .* 4 × 32 in an"):
            extract(session, source, request, print)


@pytest.mark.parametrize("ranks", [[], ["--nproc", "2", "parallel.pp=2"]], ids=["one process", "pp2"])
def test_a_late_sample_with_several_images_is_told_before_the_model_runs(folder, tmp_path, ranks):
    conversations = json.loads((folder / "shapes" / "held_out.json").read_text())
    late = conversations[6]
    late["image"] = [late["image"], conversations[5]["image"]]
    late["conversations"][0]["value"] = "<image>" + late["conversations"][0]["value"]
    data = folder / "shapes" / "late.json"
    data.write_text(json.dumps(conversations))
    out = tmp_path / "acts"
    command = [sys.executable, "-m", "forge_core", "extract", str(folder / "runs" / "shapes"), *ranks]
    command += ["--out", str(out), f"data.path={data}", "train.batch_size=2", "train.seq_len=40", "--sites"]

    done = fork_server.run([*command, "image_features"], capture_output=True, text=True, timeout=200)

    assert done.returncode == 2, done.stderr
    assert "site image_features: a store has a row for each sample, and sample 6 has 2 images or tiles" in done.stderr
    assert "counting" not in done.stderr
    assert not out.exists()
    done = fork_server.run([*command, "blocks.0.resid_post"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_a_batch_of_prompts_takes_its_images_in_order(folder, capsys):
    pair = ("--image", held_out(folder, 0), "--image", held_out(folder, 1))
    prompts = ("--prompt", "<image> a", "--prompt", "a red <image>")
    first, second = json_of("vlm", "generate", str(folder / "runs" / "shapes"), *pair, *prompts)
    _, alone, _ = generated(folder, capsys, *pair[2:], "--prompt", "a red <image>")

    assert (first["prompt"], first["images"]) == ("<image> a", 1)
    assert second["text"] == alone[0]


def test_frames_of_a_video_are_images(folder, capsys, tmp_path):
    for number in range(2):
        Image.open(held_out(folder, number)).save(tmp_path / f"{number}.png")

    code, (line,), said = generated(folder, capsys, "--video", str(tmp_path), "--prompt", "<video> a", "--json")

    assert code == 0, said
    assert json.loads(line) | {"text": ""} == {"prompt": "<image><image> a", "images": 2, "text": ""}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", "<image> a"], "--prompt: has 1 placeholders '<image>', and --image gives 0 of them"),
        (["--image", "nowhere.png"], "--image: nowhere.png is no file"),
        (["--video", "nowhere.mp4"], "--video: nowhere.mp4 is not there"),
        (["--image", __file__], "cannot be read"),
        (["--prompt", ""], "--prompt 1 is empty; give it at least one character"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(folder, capsys, arguments, sentence):
    code, lines, said = generated(folder, capsys, *arguments)

    assert (code, lines) == (2, [])
    assert sentence in said


def test_forge_eval_measures_answers_with_real_shuffled_and_blank_images(folder, capsys):
    capsys.readouterr()
    keys = ["--samples", "8", "--max-new-tokens", "6", "--measures", "exact_match,cider"]
    source = f'data.path="{folder}/shapes/held_out.json"'

    code = main(["eval", str(folder / "runs" / "shapes"), "--evaluation", "image_dependence", *keys, source, "--json"])
    said = capsys.readouterr()

    assert code == 0, said.err
    found = {key.partition("image_dependence/")[2]: value for key, value in json.loads(said.out).items()}
    kinds = ("real", "shuffled", "blank")
    assert set(found) >= {f"{name}/{images}" for name in ("loss", "exact_match", "cider") for images in kinds}
    assert found["loss/real"] < found["loss/shuffled"]


def test_forge_eval_by_name_measures_what_the_job_says_of_that_evaluation(folder, capsys):
    own = f"""evaluations=[{{name="image_dependence", samples=8, max_new_tokens=4, measures=["cider"], data={{
        name="image_text", path="{folder}/shapes/held_out.json", format="llava", token_grid=[4, 4],
        processor={{name="square", size=32}},
        tokenizer={{name="tokenizer_file", path="{folder}/shapes/tokenizer.json"}}}}}}]""".replace("\n", "")
    assert main(["run", str(folder / "job.toml"), "run.name=with_own", "train.steps=2", own]) == 0
    capsys.readouterr()

    code = main(["eval", str(folder / "runs" / "with_own"), "--evaluation", "image_dependence", "--json"])
    said = capsys.readouterr()

    assert code == 0, said.err
    measured = {key.partition("image_dependence/")[2].partition("/")[0] for key in json.loads(said.out)}
    assert measured - {""} == {"loss", "cider"}


NAFLEX = 'processor={name="naflex", size=32, patch=8, max_patches=12}'
TINY = "num_hidden_layers=1, num_attention_heads=2, hidden_size=16"
COMBINATIONS = {
    "conv_vit of any size": ['model.encoder={name="conv_vit", any_size=true}'],
    "conv_vit, padded": ['model.encoder={name="conv_vit", any_size=true}', f"data.{NAFLEX}"],
    "siglip2_naflex": [
        f'model.encoder={{name="siglip2_naflex", architecture={{{TINY}, patch_size=8, num_patches=16}}}}',
        f"data.{NAFLEX}",
    ],
    "siglip": [f'model.encoder={{name="siglip", architecture={{{TINY}, patch_size=8, image_size=32}}}}'],
    "clip": [f'model.encoder={{name="clip", architecture={{{TINY}, patch_size=8, image_size=32}}}}'],
    "dinov2": [f'model.encoder={{name="dinov2", architecture={{{TINY}, patch_size=8, image_size=32}}}}'],
    "concatenated": [
        "model.encoder.name=concatenated",
        'model.encoder.parts=[{encoder={name="conv_vit"}}, {encoder={name="conv_vit", dim=32, any_size=true}}]',
    ],
    "anyres": ["model.newline=true", 'data.processor={name="anyres", size=32, grids=[[1, 2], [2, 2]]}'],
    "tiles": ["model.newline=true", 'data.processor={name="tiles", size=32}'],
    "linear": ["model.connector.name=linear"],
    "fused_mlp": ["model.connector.name=fused_mlp"],
    "average_pool": ["model.connector.name=average_pool", "data.token_grid=[2, 2]"],
    "attention_pool": ["model.connector.name=attention_pool", "data.token_grid=[2, 2]"],
    "pixel_shuffle": ["model.connector.name=pixel_shuffle", "data.token_grid=[2, 2]"],
    "resampler": ["model.connector.name=resampler", "data.token_grid=[1, 64]"],
}
"""Each encoder, image processor and connector beside the usual others."""


@pytest.mark.parametrize("name", COMBINATIONS)
def test_each_part_trains_and_says_something(folder, capsys, name):
    run = name.replace(" ", "-").replace(",", "")
    long = ["train.seq_len=128", "model.max_seq_len=160", "train.batch_size=4", "train.steps=2"]
    assert main(["run", str(folder / "job.toml"), f"run.name={run}", *long, *COMBINATIONS[name]]) == 0
    capsys.readouterr()

    code = main(["vlm", "generate", str(folder / "runs" / run), "--image", held_out(folder, 0)])

    assert code == 0, capsys.readouterr().err


def test_one_question_has_no_images_of_others(folder, capsys):
    capsys.readouterr()
    keys = ["--samples", "1", "--max-new-tokens", "6", f'data.path="{folder}/shapes/held_out.json"']

    assert main(["eval", str(folder / "runs" / "shapes"), "--evaluation", "image_dependence", *keys]) == 2
    assert "there is one question, which has no other's images" in capsys.readouterr().err


@pytest.mark.parametrize("accumulation", [1, 2])
def test_mfu_counts_the_tiles_of_steps(folder, build, monkeypatch, accumulation):
    peak, name = 1e12, f"mfu-{accumulation}"
    monkeypatch.setattr(metrics, "peak_flops", lambda device: peak)
    keys = [f"run.name={name}", "train.steps=4", "metrics.interval=2", "train.batch_size=4"]
    assert main(["run", str(folder / "job.toml"), *keys, f"train.grad_accumulation={accumulation}"]) == 0

    run = folder / "runs" / name
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    said = json.loads((run / "environment.json").read_text())["flops_per_token"]
    encoder = build.resolve("vision_encoder", {"name": "conv_vit", "dim": 32, "n_layers": 2, "n_heads": 2})
    connector = build.resolve("connector", {"name": "mlp"})
    tile = 3 * (encoder.config.flops(32, 32) + connector.config.flops((4, 4), 32, 32))
    assert [line["step"] for line in logged] == [1, 2, 4]
    for line in logged:  # an image in 24 tokens, where flops_per_token has one in 48
        found = line["mfu"] * peak / line["tokens_per_second"]
        assert found == pytest.approx(said + tile / 24 - tile / 48, rel=1e-6)


LAYOUTS = {
    "fsdp2": (2, ["train.batch_size=2"]),
    "tp2": (2, ["parallel.tp=2"]),
    "cp2": (2, ["parallel.cp=2"]),
    "pp2": (2, ["parallel.pp=2", "train.batch_size=1", "train.grad_accumulation=4"]),
}


@pytest.mark.slow
@pytest.mark.nightly  # by day, the next but one samples in each
@pytest.mark.parametrize("training", ["joint", "crossed"])
def test_answers_are_the_same_in_every_layout(tmp_path_factory, training):
    launcher = Launcher(tmp_path_factory.mktemp("answers"))
    asked = (
        'evaluations=[{name="image_dependence", samples=5, max_new_tokens=3, '
        'measures=["exact_match", "cider", "vqa_accuracy"]}]'
    )
    shared = [*TRAININGS[training], asked, "train.steps=3", "eval.interval=0"]
    works = [Work(f"{training}-one", 1, shared)]
    works += [Work(f"{training}-{name}", ranks, [*shared, *keys]) for name, (ranks, keys) in LAYOUTS.items()]

    launcher.launch(works)

    def measured(name):
        lines = launcher.metrics(f"{training}-{name}")
        return {key: value for line in lines for key, value in line.items() if "image_dependence" in key}

    expected = measured("one")
    assert len(expected) == 12
    for name in LAYOUTS:
        assert measured(name) == pytest.approx(expected, rel=1e-5, abs=1e-9), name


def captions_file(folder):
    """The callback of the how-to page."""
    page = (Path(__file__).parents[2] / "docs/how-to/log-captions.md").read_text(encoding="utf-8")
    (text,) = re.findall(r":caption: captions.py\n(.*?)^```$", page, re.M | re.S)
    (folder / "captions.py").write_text(text, encoding="utf-8")
    return folder / "captions.py"


@pytest.mark.parametrize("fusion", ["joint_decoder", "cross_attention"])
def test_a_callback_says_of_images_what_the_command_says_of_the_saved_model(folder, capsys, fusion):
    pictures = [held_out(folder, number) for number in range(2)]
    asked = f"callbacks=[{{name='captions', pictures={pictures}, max_new_tokens=6}}]"
    one_token = "data.one_token_an_image=true" if fusion == "cross_attention" else "data.validation=0.2"
    keys = [
        f"run.name=said-{fusion}",
        f"model.fusion.name={fusion}",
        one_token,
        "data.validation=0.2",
        "eval.interval=30",
    ]
    assert main(["run", str(folder / "job.toml"), f"plugins.files=['{captions_file(folder)}']", asked, *keys]) == 0
    logged = re.findall(r"step 30, \d+.png: (.*)", capsys.readouterr().out)

    run = str(folder / "runs" / f"said-{fusion}")
    for picture, caption in zip(pictures, logged, strict=True):
        asked = ["--image", picture, "--max-new-tokens", "6", "--trust-files"]
        assert main(["vlm", "generate", run, *asked]) == 0
        assert capsys.readouterr().out.strip() == caption


@pytest.mark.slow
def test_a_callback_samples_the_same_in_every_layout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captions")
    launcher = Launcher(folder)
    pictures = sorted((folder / "pictures").glob("*.png"))[:3]
    asked = f"callbacks=[{{name='captions', pictures={[str(one) for one in pictures]}, max_new_tokens=4}}]"
    own = [f"plugins.files=['{captions_file(folder)}']", asked, "train.steps=3", "eval.interval=3", "eval.batches=1"]
    shared = [*TRAININGS["joint"], *own]
    works = [Work("captions-one", 1, shared)]
    works += [Work(f"captions-{name}", ranks, [*shared, *keys]) for name, (ranks, keys) in LAYOUTS.items()]

    launcher.launch(works)

    def said(name):
        log = (launcher.run_dir(f"captions-{name}") / "log.txt").read_text(encoding="utf-8")
        return re.findall(r"step \d+, .*png: .*", log)

    assert len(said("one")) == 3
    for name in LAYOUTS:
        assert said(name) == said("one"), name
