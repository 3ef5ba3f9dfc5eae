"""The JSON schema of everything that the dashboard sends: `python -m dart.dashboard.schema`.

`npm run types` in web/ makes the pages' TypeScript types from it.
"""

from __future__ import annotations

import dataclasses

from pydantic import TypeAdapter

from dart.core.json_text import JSON, to_json
from dart.inspection import records


def schema() -> dict[str, JSON]:
    """One schema with a definition for each record of `dart.inspection.records`, and those that they are made of."""
    kinds = [kind for kind in vars(records).values() if dataclasses.is_dataclass(kind)]
    _, made = TypeAdapter.json_schemas(
        [(kind.__name__, "serialization", TypeAdapter(kind)) for kind in kinds if isinstance(kind, type)],
        ref_template="#/definitions/{model}",
    )
    definitions = made["$defs"]
    for one in definitions.values():
        _tidy(one)
    names = sorted(definitions)
    return {
        "title": "Everything",
        "type": "object",
        "definitions": {name: definitions[name] for name in names},
        "properties": {name: {"$ref": f"#/definitions/{name}"} for name in names},
        "required": list(names),
        "additionalProperties": False,
    }


def _tidy(definition: dict[str, JSON]) -> None:
    """Every field is always sent, and a field's own title would become a type of its own."""
    properties = definition.get("properties")
    if not isinstance(properties, dict):
        return
    for one in properties.values():
        one.pop("title", None)
        one.pop("default", None)
        _untitled_items(one)
    definition["required"] = list(properties)
    definition["additionalProperties"] = False


def _untitled_items(field: dict[str, JSON]) -> None:
    """Lists of a fixed length become tuples; all others have any length. The generator of types reads an older draft of
    JSON schema, in which a tuple's parts are its `items`."""
    if field.get("type") != "array":
        return
    field.setdefault("minItems", 0)
    if "prefixItems" in field:
        field["items"] = field.pop("prefixItems")
    elif isinstance(inner := field.get("items"), dict):
        _untitled_items(inner)


if __name__ == "__main__":
    print(to_json(schema(), indent=1))
