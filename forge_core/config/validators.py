"""Limits of attrs validators in words and in JSON Schema. Their own messages quote classes of Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge_core.config.describe import literal, one_of
from forge_core.config.problems import KeyPath
from forge_core.errors import ConfigError

_COMPARISONS = {
    ">": ("greater than", "exclusiveMinimum"),
    ">=": ("at least", "minimum"),
    "<": ("less than", "exclusiveMaximum"),
    "<=": ("at most", "maximum"),
}


def violations(config: Any, field: Any, value: Any, validator: Any) -> Iterator[tuple[KeyPath, str]]:
    """The objection of ``validator`` to ``value``: the position within the value, and a sentence.

    Args:
        config: the instance, for validators that compare fields.
        field: the ``attrs.Attribute``.
    """
    parts = _parts(validator)
    match type(validator).__name__:
        case "_AndValidator":
            for one in parts["_validators"]:
                found = list(violations(config, field, value, one))
                if found:  # later ones may rely on earlier ones, as n % k does on k > 0
                    yield from found
                    return
        case "_OptionalValidator":
            if value is not None:
                yield from violations(config, field, value, parts["validator"])
        case "_DeepIterable":
            if parts["iterable_validator"] is not None:
                yield from violations(config, field, value, parts["iterable_validator"])
            members = [(index, item, parts["member_validator"]) for index, item in enumerate(value)]
            yield from _within(config, field, members)
        case "_DeepMapping":
            validators = parts["key_validator"], parts["value_validator"]
            members = [
                (key, one, of) for key, item in value.items() for one, of in zip((key, item), validators, strict=True)
            ]
            yield from _within(config, field, members)
        case _:
            try:
                validator(config, field, value)
            except (ValueError, ConfigError) as error:
                rule = _rule(validator)
                said = str(error.args[0]) if error.args else "is not allowed"
                yield (), f"{rule}, got {literal(value)}" if rule else said.removeprefix(f"'{field.name}' ")


def _within(config: Any, field: Any, members: Sequence[tuple[Any, Any, Any]]) -> Iterator[tuple[KeyPath, str]]:
    """Violations in the parts of a value: each with its key, and its validator if it has one."""
    for key, value, validator in members:
        if validator is not None:
            for path, sentence in violations(config, field, value, validator):
                yield (key, *path), sentence


def schema_limits(validator: Any) -> dict[str, Any]:
    """The JSON Schema keywords of a validator, as far as there are any. Lengths are given for strings and arrays."""
    parts = _parts(validator)
    match type(validator).__name__:
        case "_AndValidator":
            return {key: item for one in parts["_validators"] for key, item in schema_limits(one).items()}
        case "_OptionalValidator":
            return schema_limits(parts["validator"])
        case "_OrValidator":
            alternatives = [schema_limits(one) for one in parts["validators"]]
            return {"anyOf": alternatives} if all(alternatives) else {}
        case "_DeepIterable":
            items = schema_limits(parts["member_validator"])
            return {**schema_limits(parts["iterable_validator"]), **({"items": items} if items else {})}
        case "_NumberValidator":
            return {_COMPARISONS[parts["compare_op"]][1]: parts["bound"]}
        case "_InValidator":
            return {"enum": list(parts["_original_options"])}
        case "_MinLengthValidator":
            return {"minLength": parts["min_length"], "minItems": parts["min_length"]}
        case "_MaxLengthValidator":
            return {"maxLength": parts["max_length"], "maxItems": parts["max_length"]}
    return {}


def _rule(validator: Any) -> str:
    """``"must be greater than 0"``; empty for a validator that attrs does not know, which has words of its own."""
    parts = _parts(validator)
    match type(validator).__name__:
        case "_OrValidator":
            rules = [_rule(one) for one in parts["validators"]]
            return " or ".join([rules[0], *(rule.removeprefix("must be ") for rule in rules[1:])]) if all(rules) else ""
        case "_NumberValidator":
            return f"must be {_COMPARISONS[parts['compare_op']][0]} {literal(parts['bound'])}"
        case "_InValidator":
            options = list(parts["_original_options"])
            return f"must be {literal(options[0])}" if len(options) == 1 else f"must be one of {one_of(options)}"
        case "_MinLengthValidator":
            length = parts["min_length"]
            return "must not be empty" if length == 1 else f"must have a length of at least {length}"
        case "_MaxLengthValidator":
            return f"must have a length of at most {parts['max_length']}"
        case "_MatchesReValidator":
            return f"must match the regular expression '{parts['pattern'].pattern}'"
    return ""


def _parts(validator: Any) -> Mapping[str, Any]:
    """The parts of an attrs validator, which are slotted attrs classes; nothing for a function."""
    fields = getattr(type(validator), "__attrs_attrs__", ())
    return {field.name: getattr(validator, field.name) for field in fields}
