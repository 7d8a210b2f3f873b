"""JSON schema of yaml files (nested sections and trio together), for completion in editors."""

import json

from mindspeed_ms.config.argument_table import row_at
from mindspeed_ms.config.schema import SECTIONS
from mindspeed_ms.config.trio_table import SECTION_KEYS, TRIO


def build_schema():
    """JSON schema (dict) of one yaml file: any mixture of nested sections and trio keys."""
    definitions, properties = {}, {}
    for name, kind in SECTIONS.items():
        definitions[name] = section_schema(kind, definitions)
        properties[name] = {"$ref": f"#/$defs/{name}"}
    properties["general_config"] = {"type": ["object", "null"]}
    tree = _trio_tree()
    for name in ("train_config", "accelerate_config"):
        properties[name] = _trio_schema(tree[name], name)
    # model_config holds the nested fields or the trio's llm
    definitions["model_config"]["properties"]["llm"] = _trio_schema(tree["model_config"]["llm"], "model_config.llm")
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "mindspeed_ms configuration",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions,
    }


def schema_text():
    """The schema as the text of configs/schema/config.json."""
    return json.dumps(build_schema(), ensure_ascii=False, indent=1) + "\n"


def section_schema(kind, definitions):
    """JSON schema of one section, without links to other sections."""
    raw = kind.model_json_schema(mode="validation")
    definitions.update({name: _clean(value) for name, value in raw.get("$defs", {}).items() if name not in _class_names()})
    fields = kind.own_fields()
    properties = {name: _clean(value) for name, value in raw["properties"].items() if name in fields}
    for spelling, field in kind.spellings.items():
        properties[spelling] = {
            **properties[field],
            "description": f"The same as {field}. {properties[field].get('description', '')}",
        }
    for group, names in kind.groups.items():
        properties[group] = {"type": ["object", "null"], "properties": {key: properties[field] for key, field in names.items()}}
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _class_names():
    return {kind.__name__ for kind in SECTIONS.values()}


def _clean(value):
    value = {key: item for key, item in value.items() if key not in ("title", "link")}
    if "properties" in value:
        value["properties"] = {name: _clean(item) for name, item in value["properties"].items()}
    return value


def _trio_tree():
    tree = {}
    for path in (*TRIO, *SECTION_KEYS):
        node = tree
        for word in path.split("."):
            node = node.setdefault(word, {})
    return tree


def _trio_schema(tree, path):
    if path in SECTION_KEYS:
        return {"$ref": f"#/$defs/{SECTION_KEYS[path]}"}
    if path in TRIO:
        entry = TRIO[path]
        row = row_at(entry.path) if entry.path else None
        text = " ".join(part for part in (row.help_en if row else "", entry.note, row.help_zh if row else "") if part)
        return {"description": text} if text else {}
    properties = {word: _trio_schema(node, f"{path}.{word}") for word, node in tree.items()}
    if "residual_connection" in properties:
        properties["residual-connection"] = properties["residual_connection"]
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}
