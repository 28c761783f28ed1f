"""JSON Schema of pipeline files."""

from __future__ import annotations

from typing import Any

from verl_workflow.spec._fields import NAME_PATTERN
from verl_workflow.spec._model import CLASSES, Head

_PARAM = {"type": "string", "pattern": r"\$\{(params|matrix)\.", "description": "the value of a param or of a matrix"}


def json_schema() -> dict[str, Any]:
    """The YAML form as JSON Schema (draft 2020-12), for editors: stages by name or in a list, any value a param.

    It knows fields and their types; what holds between stages only `load` checks.
    """
    definitions: dict[str, Any] = {}
    head = _taken(Head.model_json_schema(ref_template="#/$defs/{model}"), definitions)
    kinds = []
    named = []
    for model in CLASSES.values():
        schema = _taken(model.model_json_schema(ref_template="#/$defs/{model}"), definitions)
        schema["required"] = sorted({"kind", *schema.get("required", [])})
        schema["properties"]["kind"].pop("default", None)
        definitions[f"{model.__name__}InList"] = schema
        definitions[model.__name__] = {
            **schema,
            "properties": {key: value for key, value in schema["properties"].items() if key != "name"},
            "required": [key for key in schema["required"] if key != "name"],
        }
        kinds.append(_for_kind(schema, model.__name__))
        named.append(_for_kind(schema, f"{model.__name__}InList"))
    kind = {"properties": {"kind": {"enum": list(CLASSES)}}, "required": ["kind"], "type": "object"}
    head["properties"]["stages"] = {
        "description": "Stages by name; their order follows from references.",
        "anyOf": [
            {
                "type": "object",
                "minProperties": 1,
                "propertyNames": {"pattern": NAME_PATTERN.replace(r"\Z", "$")},
                "additionalProperties": {**kind, "allOf": kinds},
            },
            {"type": "array", "minItems": 1, "items": {**kind, "allOf": named}},
        ],
    }
    head["required"] = ["version", "name", "stages"]
    head["title"] = "verl-workflow pipeline"
    head["description"] = "A post-training pipeline."
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **head, "$defs": definitions}


def _for_kind(schema: dict[str, Any], definition: str) -> dict[str, Any]:
    # By condition instead of oneOf: editors then tell what is wrong in the stage, not that no alternative matches.
    return {
        "if": {"properties": {"kind": {"const": schema["properties"]["kind"]["const"]}}, "required": ["kind"]},
        "then": {"$ref": f"#/$defs/{definition}"},
    }


def _taken(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    for name, definition in schema.pop("$defs", {}).items():
        _python_patterns(definition)
        definitions[name] = definition if name == "Param" else _with_params(definition)
    _python_patterns(schema)
    return _with_params(schema)


def _with_params(schema: dict[str, Any]) -> dict[str, Any]:
    properties = {
        name: value if name in {"kind", "version", "params"} or _is_free(value) else _or_param(value)
        for name, value in schema.get("properties", {}).items()
    }
    return {**schema, "properties": properties} if properties else schema


def _is_free(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "string" and not {"pattern", "enum", "const"} & schema.keys()


def _or_param(schema: dict[str, Any]) -> dict[str, Any]:
    outer: dict[str, Any] = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    inner = {key: value for key, value in schema.items() if key not in outer}
    return {**outer, "anyOf": [inner, _PARAM]}


def _python_patterns(schema: Any) -> None:
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            schema["pattern"] = schema["pattern"].replace(r"\Z", "$")
        if isinstance(schema.get("patternProperties"), dict):
            named = schema["patternProperties"]
            schema["patternProperties"] = {name.replace(r"\Z", "$"): value for name, value in named.items()}
        for value in schema.values():
            _python_patterns(value)
    elif isinstance(schema, list):
        for value in schema:
            _python_patterns(value)
