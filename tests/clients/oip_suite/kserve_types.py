"""Holds KServe's objects to the types of its SDK, which are generated from the Go types that make its CRDs.

    python kserve_types.py < OBJECTS      in the environment of KServe's SDK

Reads a JSON list of objects; prints a JSON list of what is wrong with each: fields that a type does not have,
as for an API server that validates strictly, other types, and required fields that are missing. Enumerations
and patterns are in the CRDs only.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import kserve
import kubernetes.client

KINDS = {
    "InferenceService": "V1beta1InferenceService",
    "ServingRuntime": "V1alpha1ServingRuntime",
    "ClusterServingRuntime": "V1alpha1ClusterServingRuntime",
}
PLAIN: dict[str, Any] = {"str": str, "int": int, "bool": bool, "float": (int, float)}
# Quantities and ports are texts or numbers; their types have no fields.
EITHER = ("ResourceQuantity", "IntstrIntOrString")


def problems(name: str, value: Any, path: str) -> Iterator[str]:
    """What is wrong with a value of the type `name`, as the SDK writes it: `list[V1Container]`."""
    nested = re.fullmatch(r"(?:[Ll]ist\[|[Dd]ict[(\[]str, )(.*)[)\]]", name)
    if nested:
        kind = list if name.lower().startswith("list") else dict
        if not isinstance(value, kind):
            yield f"{path} is {value!r}, expected a {kind.__name__}"
            return
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from problems(nested[1], each, f"{path}.{key}" if kind is dict else f"{path}[{key}]")
    elif name in PLAIN:
        if not isinstance(value, PLAIN[name]) or (isinstance(value, bool) and name != "bool"):
            yield f"{path} is {value!r}, expected {name}"
    elif name == "object" or name in EITHER:
        if not isinstance(value, (str, int)):
            yield f"{path} is {value!r}, expected a text or a number"
    else:
        yield from _fields(name, value, path)


def _fields(name: str, value: Any, path: str) -> Iterator[str]:
    kind = (
        getattr(kserve, name, None) or getattr(kserve.models, name, None) or getattr(kubernetes.client, name)
    )
    if not isinstance(value, dict):
        yield f"{path} is {value!r}, expected an object ({name})"
        return
    by_key = {key: attribute for attribute, key in kind.attribute_map.items()}
    for key, each in value.items():
        if key not in by_key:
            yield f"{path}.{key} is unknown to {name}"
        else:
            yield from problems(kind.openapi_types[by_key[key]], each, f"{path}.{key}")
    try:  # the SDK's own check of what is required
        kind(**{by_key[key]: each for key, each in value.items() if key in by_key})
    except ValueError as err:
        yield f"{path}: {err}"


if __name__ == "__main__":
    found = [list(problems(KINDS[each["kind"]], each, each["kind"])) for each in json.load(sys.stdin)]
    print(json.dumps(found))
