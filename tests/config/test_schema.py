"""The JSON Schema accepts what the converter accepts, and refuses typing mistakes.

No validator is among the requirements, so this file has one for the keywords that the schema uses.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import pytest

from forge_core.job import job_table
from forge_plugins_monitor.schema import job_schema

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
ANNOTATIONS = {"$schema", "$defs", "$comment", "title", "description", "default", "deprecated", "if", "then"}


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    return all(_keyword(key, rule, value, schema, root) for key, rule in schema.items() if key not in ANNOTATIONS) and (
        "if" not in schema or not is_valid(value, schema["if"], root) or is_valid(value, schema["then"], root)
    )


def _keyword(key: str, rule: Any, value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    match key:
        case "$ref":
            return is_valid(value, root["$defs"][rule.removeprefix("#/$defs/")], root)
        case "type":
            return isinstance(value, TYPES[rule]) and (rule == "boolean" or not isinstance(value, bool))
        case "enum":
            return any(type(value) is type(one) and value == one for one in rule)
        case "const":
            return type(value) is type(rule) and value == rule
        case "anyOf":
            return any(is_valid(value, one, root) for one in rule)
        case "allOf":
            return all(is_valid(value, one, root) for one in rule)
        case "properties":
            return not isinstance(value, dict) or all(
                is_valid(value[name], one, root) for name, one in rule.items() if name in value
            )
        case "additionalProperties":
            others = value.keys() - schema.get("properties", {}).keys() if isinstance(value, dict) else ()
            return all(rule is not False and is_valid(value[name], rule, root) for name in others)
        case "required":
            return not isinstance(value, dict) or all(name in value for name in rule)
        case "items":
            return not isinstance(value, list) or all(is_valid(item, rule, root) for item in value)
        case "minItems" | "maxItems" | "minLength" | "maxLength":
            if not isinstance(value, list if key.endswith("Items") else str):
                return True
            return len(value) >= rule if key.startswith("min") else len(value) <= rule
        case "minimum":
            return not is_number or value >= rule
        case "exclusiveMinimum":
            return not is_number or value > rule
        case "maximum":
            return not is_number or value <= rule
        case "exclusiveMaximum":
            return not is_number or value < rule
    raise AssertionError(f"the schema uses {key}, which this test does not know")


@pytest.fixture(scope="module")
def schema(catalog) -> dict[str, Any]:
    made = job_schema(catalog)
    json.dumps(made)  # plain data
    return made


def test_every_reference_leads_somewhere(schema):
    references = re.findall(r'"\$ref": "#/\$defs/([^"]+)"', json.dumps(schema))

    assert references
    assert set(references) <= schema["$defs"].keys()


@pytest.mark.parametrize(
    "text",
    [
        'extends = "base.toml"\nunset = ["train.seed"]\n[train]\nsteps = 3',
        'optimizer = "adamw"\ncallbacks = [{name = "progress", interval = 2}]',
        'model = {name = "decoder", feed_forward = {name = "moe", router = {name = "acme-routers:topk", k = 3}}}',
        'parallel.passes = {fsdp = true, compile = false, x = {name = "standard:fsdp", reshard = false}}',
        'data = {name = "text", weights = {a = 1}, suffixes = ["a"], mode = "fast", files = "x"}',
        'model.feed_forward = {name = "moe", router = {name = "unresolvable", anything = 1}}',
        "parallel.dp_shard = -1",
    ],
)
def test_what_is_right_is_accepted(schema, text):
    assert is_valid(tomllib.loads(text), schema, schema)


@pytest.mark.parametrize(
    "text",
    [
        "trian = {}",
        "[train]\nstepz = 3",
        "[train]\nsteps = 0",
        "[train]\nsteps = 1.5",
        "[train]\nsteps = true",
        'optimizer = "adamww"',
        'optimizer = {name = "adamw", k = 3}',
        'optimizer = {name = "adamw", lr = 0}',
        'optimizer = {name = "adamw", betas = [0.9]}',
        'optimizer = {name = "adamw", betas = [0.9, 1]}',
        'optimizer = {name = "adamw", state = "fp16"}',
        'optimizer = {name = "adamw", groups = [{pattern = ""}]}',
        'model = {name = "decoder", feed_forward = {name = "moe", router = "topk"}}',
        'model = {name = "decoder", feed_forward = {name = "moe", router = {name = "acme-routers:topk", q = 3}}}',
        "parallel.passes.fsdp = 3",
        "parallel.passes.fsdp.reshard = 3",
        "parallel.passes.nope = {name = 'nope'}",
        "parallel.dp_shard = 0",
        'data = {name = "text", mode = "slow"}',
        'data = {name = "text", path = ""}',
        'callbacks = [{name = "progress", title = "much too long"}]',
    ],
)
def test_what_is_wrong_is_refused(schema, text):
    assert not is_valid(tomllib.loads(text), schema, schema)


def test_resolved_jobs_are_accepted(schema, load):
    assert is_valid(job_table(load(world_size=4)), schema, schema)


def test_keys_are_described_by_the_docstrings_under_the_fields(schema):
    adamw = schema["$defs"]["optimizer.standard:adamw"]["properties"]

    assert adamw["lr"] == {"description": "Learning rate.", "type": "number", "exclusiveMinimum": 0}
    assert adamw["betas"]["default"] == [0.9, 0.95]
    assert schema["$defs"]["forge_core.config.sections.TrainSection"]["properties"]["steps"]["description"]


def test_deprecated_components_are_marked(schema):
    assert schema["$defs"]["optimizer.standard:adam-w"]["deprecated"] is True


@pytest.mark.parametrize(
    ("router", "why"),
    [
        ("gone", "cannot import"),
        ("unresolvable", "name 'Unknown' is not defined"),
        ("unwritable", "1j cannot be written in TOML"),
        ("failing", "by zero"),
    ],
)
def test_a_component_whose_keys_cannot_be_known_does_not_spoil_the_rest(schema, router, why):
    json.dumps(schema)

    assert why in schema["$defs"][f"router.acme-routers:{router}"]["$comment"]
