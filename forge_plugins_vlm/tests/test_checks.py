"""Jobs that cannot be are refused before anything is built, in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_vlm import entries, images

from forge_core.config.toml_file import read_document
from forge_core.errors import ConfigError
from forge_core.job import load_job, notes
from forge_core.registry.discovery import discover

CONFIGS = Path(__file__).parents[2] / "configs" / "vlm"
IMAGES = (
    "{{name='image_text', path='.', processor={{name='square', size={size}}}, token_grid=[{grid}, {grid}], "
    "tokenizer={{name='tokenizer_file', path='tokenizer.json'}}}}"
)
TWO_SIZES = (
    f"[{{name='a', weight=1, source={IMAGES.format(size=32, grid=4)}}}, "
    f"{{name='b', weight=1, source={IMAGES.format(size=64, grid=8)}}}]"
)
PADDED = IMAGES.format(size=32, grid=4).replace("'square', size=32", "'naflex', size=32, patch=8, max_patches=16")
ONE_PADDED = (
    f"[{{name='a', weight=1, source={IMAGES.format(size=32, grid=4)}}}, {{name='b', weight=1, source={PADDED}}}]"
)


@pytest.fixture(scope="module")
def refused():
    """Returns what is said of a config with overrides."""

    def refused(name, *overrides, ranks=1):
        with pytest.raises(ConfigError) as caught:
            load_job(CONFIGS / f"{name}.toml", list(overrides), catalog=lambda *_: discover(), world_size=ranks)
        return str(caught.value)

    return refused


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("joint_decoder", ["model.encoder.name=conv_vitt"], "Did you mean 'conv_vit'"),
        ("joint_decoder", ["model.connector.name=mpl"], "Did you mean 'mlp'"),
        ("joint_decoder", ["model.fusion.name=cross_atention"], "Did you mean 'cross_attention'"),
        ("joint_decoder", ["data.processor.name=sqare"], "Did you mean 'square'"),
        (
            "joint_decoder",
            ["data.token_grid=[2, 4]"],
            "gives 4 × 4 = 16 tokens for a tile, and data.token_grid says 8; set data.token_grid = [4, 4]",
        ),
        (
            "joint_decoder",
            ['evaluations=[{name="image_choices", path="a", token_grid=[2, 4], processor={name="square", size=32}}]'],
            "and evaluations[0].token_grid says 8; set evaluations[0].token_grid = [4, 4]",
        ),
        (
            "joint_decoder",
            ["evaluations.0.max_new_tokens=24"],
            "evaluations[0].max_new_tokens: 24 leave no room for a question in train.seq_len = 24; lower it",
        ),
        (
            "joint_decoder",
            ["data.processor.size=48"],
            "data.processor gives tiles of 48 × 48 pixels: ",
        ),
        (
            "joint_decoder",
            ["model.encoder.patch=16", "data.token_grid=[2, 2]"],
            "and evaluations[0].data.token_grid says 16; set evaluations[0].data.token_grid = [2, 2]",
        ),
        (
            "joint_decoder",
            [f"eval.data={IMAGES.format(size=32, grid=2)}"],
            "and eval.data.token_grid says 4; set eval.data.token_grid = [4, 4]",
        ),
        (
            "joint_decoder",
            ["model.encoder.any_size=true", f"data={{name='mixture', sources={TWO_SIZES}}}"],
            "several sizes to one batch, and 32 × 32 is not here; set model.encoded_sizes = [[32, 32], [64, 64]]",
        ),
        (
            "joint_decoder",
            ["model.encoded_sizes=[[32, 32], [64, 64]]", f"data={{name='mixture', sources={TWO_SIZES}}}"],
            "data.sources[1].source.processor gives tiles of 64 × 64 pixels: conv_vit takes tiles of 32 × 32 pixels",
        ),
        (
            "joint_decoder",
            [
                "model.encoder.any_size=true",
                "model.encoded_sizes=[[32, 32], [64, 64], [32, 32]]",
                f"data={{name='mixture', sources={TWO_SIZES}}}",
            ],
            "names [32, 32] twice, and it would be encoded twice; name it once",
        ),
        (
            "joint_decoder",
            ["model.encoded_sizes=[[48, 48]]"],
            "no source gives tiles of 48 × 48 pixels to a batch that has others, too; remove it",
        ),
        (
            "joint_decoder",
            ["model.encoder.any_size=true", f"data={{name='mixture', sources={ONE_PADDED}}}"],
            "data.sources[1].source.processor gives padded tiles, and data.sources[0].source.processor gives whole",
        ),
        (
            "joint_decoder",
            ["data.one_token_an_image=true"],
            "joint_decoder puts all tokens of an image among those of text; set data.one_token_an_image = false",
        ),
        (
            "joint_decoder",
            ['data.processor={name="anyres", size=32, grids=[[1, 2]]}'],
            "data.processor ends the rows of an image with a learned token; set newline = true",
        ),
        (
            "joint_decoder",
            ["model.multi_token={depths=1}"],
            "no embedding of an image is a token ahead",
        ),
        (
            "joint_decoder",
            ["model.connector={name='resampler', n_heads=1000000000000000000}"],
            "1000000000000000000 heads cannot share out the 64 features of conv_vit evenly; 64 can",
        ),
        (
            "cross_attention",
            ["model.fusion.n_heads=1000000000000000000"],
            "1000000000000000000 heads cannot share out model.dim = 64 evenly; 64 can",
        ),
        (
            "joint_decoder",
            ["model.connector={name='mlp', n_layers=1000000000}"],
            "model.connector.n_layers: must be at most 1000",
        ),
        (
            "joint_decoder",
            ["model.encoder={name='clip', architecture={num_hidden_layers=1000000000}}"],
            "model.encoder.architecture.num_hidden_layers: must be at most 10000",
        ),
        (
            "joint_decoder",
            ["model.encoder={name='mllama', architecture={max_num_tiles=64}}"],
            "supported_aspect_ratios: must be others than the default, which is for max_num_tiles = 4",
        ),
        (
            "joint_decoder",
            ['data.processor={name="anyres", size=32, grids=[[1000000000, 1000000000]]}'],
            "data.processor.grids: may have at most 1024 tiles each, got [1000000000, 1000000000]",
        ),
        (
            "joint_decoder",
            ["model.connector.name=average_pool", "model.connector.window=1000000000"],
            "model.connector.window: must be at most 256",
        ),
        (
            "joint_decoder",
            ["model.fusion.bidirectional=true", "model.window=8"],
            "a window is causal; remove model.window, or bidirectional",
        ),
        (
            "joint_decoder",
            ["model.fusion.bidirectional=true", "model.attention=flash"],
            'the kernel "flash" takes no mask',
        ),
        (
            "joint_decoder",
            ["model.connector={name='resampler', n_heads=3}"],
            "model.connector.n_heads: 3 heads cannot share out the 64 features of conv_vit evenly; 2 can",
        ),
        (
            "joint_decoder",
            ["model.connector={name='attention_pool', n_heads=7}"],
            "model.connector.n_heads: 7 heads cannot share out the 64 features of conv_vit evenly; 4 can",
        ),
        (
            "joint_decoder",
            ["model.learned_positions=true"],
            "an image token stands in the place of an embedding with its position, and would have none",
        ),
        (
            "joint_decoder",
            [
                "model.fusion.mrope_sections=[4, 2, 2]",
                "model.encoder.any_size=true",
                'data.processor={name="naflex", size=32, patch=8, max_patches=16}',
            ],
            "counts rows and columns of whole tiles, and data.processor gives padded ones",
        ),
        (
            "joint_decoder",
            [
                "model.encoder.any_size=true",
                "model.connector={name='resampler'}",
                'data.processor={name="naflex", size=32, patch=8, max_patches=16}',
            ],
            "model.connector: a token of resampler stands for all of a tile, and data.processor gives padded ones",
        ),
        (
            "joint_decoder",
            [
                "model.encoder.any_size=true",
                'data.processor={name="naflex", size=32, patch=4, max_patches=16}',
            ],
            "patches of 8 pixels, which are part picture, part padding with data.processor.patch = 4; set that to 8",
        ),
        (
            "cross_attention",
            ['data.processor={name="naflex", size=32, patch=8, max_patches=16}'],
            "cross_attention sees whole tiles, and data.processor gives padded ones",
        ),
        ("cross_attention", ["model.fusion.layers=[3]"], "3 is none of the layers 0 to 2 of model.n_layers = 3"),
        ("cross_attention", ["model.fusion.layers=[1, 1]"], "must be different numbers from 0"),
        (
            "cross_attention",
            ["model.fusion.n_heads=6"],
            "model.fusion.n_heads: 6 heads cannot share out model.dim = 64 evenly; 4 can",
        ),
        (
            "cross_attention",
            ["model.fusion.n_heads=8", "model.fusion.n_kv_heads=3"],
            "model.fusion.n_kv_heads: 3 key-value heads cannot be shared out evenly to 8 heads; 2 can",
        ),
        (
            "cross_attention",
            ["model.fusion.n_heads=2"],
            "model.fusion.n_kv_heads: 4 key-value heads cannot be shared out evenly to 2 heads; 2 can",
        ),
        (
            "mixture_of_transformers",
            ["model.mixer={name='latent', kv_rank=8, plain_dim=8, rotary_dim=8, value_dim=8}"],
            "each modality has projections of its own",
        ),
        (
            "moma",
            ["model.fusion.image.n_experts=0"],
            "model.fusion.image.n_experts",
        ),
    ],
)
def test_a_job_that_cannot_be_is_told_why(refused, name, overrides, sentence):
    assert sentence in refused(name, *overrides)


@pytest.mark.parametrize(
    ("name", "override", "sentence"),
    [
        ("cross_attention", "model.fusion.n_heads=6", "model.fusion.n_heads: 6 heads cannot"),
        ("moma", "model.fusion.image={name='mlp', hidden_dim=63}", "model.fusion.image.hidden_dim: 63 features cannot"),
    ],
)
def test_what_a_fusion_finds_wrong_is_told_once(refused, name, override, sentence):
    assert refused(name, override, "parallel.tp=2", ranks=2).count(sentence) == 1


def test_a_folder_of_an_encoder_that_is_not_there_is_told_once(refused):
    pytest.importorskip("transformers")
    folder = 'model.encoder={name="siglip", path="nowhere"}'
    said = refused("joint_decoder", folder, "model.connector={name='resampler', n_heads=3}")

    assert "model.encoder.path: nowhere/config.json is not there" in said
    assert said.count("is not there") == 1


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
def test_another_filter_than_that_of_the_weights_is_told(resample, tmp_path):
    """It was read of the folder, and compared with nothing."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8, "image_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip", "intermediate_size": 48, **sizes}))
    (tmp_path / "preprocessor_config.json").write_text('{"resample": 2}')
    overrides = [f'model.encoder={{name="siglip", path="{tmp_path}"}}', f"data.processor.resample={resample}"]

    job = load_job(CONFIGS / "joint_decoder.toml", [*overrides, "evaluations=[]"], catalog=discover(), world_size=1)

    said = [line for line in notes(job, discover()) if line.startswith("model.encoder.path: ")]
    assert len(said) == (resample == "bicubic")
    assert all("resized by 'bilinear', and data.processor.resample is 'bicubic'" in line for line in said)


def test_a_layout_that_a_fusion_does_not_support_is_refused_with_the_reason(refused):
    said = refused("joint_decoder", "model.fusion.bidirectional=true", "parallel.cp=2", ranks=2)
    assert "parallel.cp = 2: a rank makes its own mask of the positions that it has, which is causal" in said

    assert "an expert cannot compare the tokens of a sequence" in refused("moma", "parallel.cp=2", ranks=2)


@pytest.mark.parametrize("key", ["n_heads", "n_kv_heads"])
def test_heads_that_look_at_images_are_shared_out_by_ranks(refused, key):
    said = refused("cross_attention", "model.fusion.n_kv_heads=1", f"model.fusion.{key}=1", "parallel.tp=2", ranks=2)
    assert f"model.fusion.{key}: 1 heads cannot be shared out evenly to parallel.tp = 2 ranks" in said


def test_experts_that_choose_do_not_generate_without_a_predictor(make_model):
    layer = {"name": "moe", "n_experts": 2, "hidden_dim": 32, "router": {"name": "expert_choice"}}
    model = make_model(fusion={"name": "moma", "image": layer}, feed_forward=layer).eval()
    given = entries("moma", "tIt")
    from forge_plugins_inference.generation import generate

    with pytest.raises(ConfigError, match="cannot generate text; train it with a router for that"):
        generate(model, [[1] * 6], max_new_tokens=2, inputs={**given, "pixels": images(1)})


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("vlm_debug", 32_649_216),
        ("vlm_7b", 7_715_449_856),
        ("vlm_7b_cross_attention", None),
        ("vlm_7b_mixture_of_transformers", None),
        ("vlm_7b_moma", None),
        ("vlm_video", None),
    ],
)
def test_presets_are_whole(build, preset, parameters):
    table = read_document(CONFIGS.parent / "model" / f"{preset}.toml").table["model"]
    with torch.device("meta"):
        model = build(build.resolve("model", table), vocab_size=50_257)

    roles = model.parameter_roles()
    assert roles.keys() == dict(model.named_parameters()).keys()
    if parameters is not None:
        assert sum(one.numel() for one in model.parameters()) == parameters
