"""Limits of attrs validators in words and in JSON Schema. Their own messages quote classes of Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge_core.config.describe import literal, one_of
from forge_core.config.problems import Problem
from forge_core.errors import ConfigError

_KEYWORDS = {">": "exclusiveMinimum", ">=": "minimum", "<": "exclusiveMaximum", "<=": "maximum"}
_WORDS = dict(zip(_KEYWORDS.values(), ("greater than", "at least", "less than", "at most"), strict=True))


def violations(config: Any, field: Any, value: Any, validator: Any) -> Iterator[Problem]:
    """The objections of ``validator`` to ``value``, with the positions within it.

    Args:
        config: the instance, for validators that compare fields.
        field: the ``attrs.Attribute``.
    """
    parts = _parts(validator)
    match type(validator).__name__:
        case "_AndValidator":
            found = (list(violations(config, field, value, one)) for one in parts["_validators"])
            yield from next(filter(None, found), [])  # later ones may rely on earlier ones, as n % k does on k > 0
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
                rule = _rule(limits := schema_limits(validator))
                said = str(error.args[0]) if error.args else "is not allowed"
                said = said.removeprefix(f"'{field.name}' ").removeprefix(f"{field.name} ")  # it stands before it
                yield Problem((), f"{rule}, got {literal(value)}" if rule else said, allowed=limits or None)


def _within(config: Any, field: Any, members: Sequence[tuple[Any, Any, Any]]) -> Iterator[Problem]:
    """Violations in the parts of a value: each with its key, and its validator if it has one."""
    for key, value, validator in members:
        if validator is not None:
            yield from (problem.under(key) for problem in violations(config, field, value, validator))


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
            return {_KEYWORDS[parts["compare_op"]]: parts["bound"]}
        case "_InValidator":
            return {"enum": list(parts["_original_options"])}
        case "_MinLengthValidator":
            return {"minLength": parts["min_length"], "minItems": parts["min_length"]}
        case "_MaxLengthValidator":
            return {"maxLength": parts["max_length"], "maxItems": parts["max_length"]}
        case "_MatchesReValidator" if parts["match_func"].__name__ == "fullmatch":
            return {"pattern": f"^({parts['pattern'].pattern})$"}
    return {}


def _rule(limits: Mapping[str, Any]) -> str:
    """``"must be greater than 0"``; empty if there are no limits."""
    match limits:
        case {"anyOf": [first, *others]} if all(map(_rule, (first, *others))):
            return " or ".join([_rule(first), *(_rule(one).removeprefix("must be ") for one in others)])
        case {"enum": [only]}:
            return f"must be {literal(only)}"
        case {"enum": options}:
            return f"must be one of {one_of(options)}"
        case {"minLength": length}:
            return "must not be empty" if length == 1 else f"must have a length of at least {length}"
        case {"maxLength": length}:
            return f"must have a length of at most {length}"
        case {"pattern": pattern}:
            return f"must match the regular expression '{pattern[2:-2]}'"
    words = [f"{_WORDS[keyword]} {literal(limit)}" for keyword, limit in limits.items() if keyword in _WORDS]
    return f"must be {' and '.join(words)}" if words else ""


def _parts(validator: Any) -> Mapping[str, Any]:
    """The parts of an attrs validator, which are slotted attrs classes; nothing for a function."""
    fields = getattr(type(validator), "__attrs_attrs__", ())
    return {field.name: getattr(validator, field.name) for field in fields}
