"""Holds KServe's objects to its CRDs (kserve.yaml), as strict field validation of an API server does.

    python kserve_schema.py < REQUEST      in the environment of kubernetes-validate

Reads {"facts": the content of kserve.yaml, "objects": [...]}; prints {"problems": a list for each object,
"fields": the names of the fields of each type}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import referencing

Schema = dict[str, Any]
QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
PLAIN: dict[str, Schema] = {
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "boolean": {"type": "boolean"},
    "object": {"type": "object"},
    "int32": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    "int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
}
DEFAULTS = {"protocol": "TCP"}  # of the keys of lists: an API server fills them in before it compares


class Schemas:
    """The types of kserve.yaml as JSON Schemas, which refer to the definitions of Kubernetes.

    A fact that names a type or a field that Kubernetes does not have raises KeyError.
    """

    def __init__(self, facts: dict[str, Any], kubernetes: Schema) -> None:
        self._types = facts["types"]
        self._definitions = kubernetes["$defs"]
        self._base = f"{kubernetes['$id']}#/$defs/"

    def all(self) -> Schema:
        """The types by their names."""
        return {name: self._of_type(name) for name in self._types}

    def of_kind(self, kind: str, version: str, spec: str) -> Schema:
        """The schema of a whole object."""
        fields = {
            "apiVersion": {"const": version},
            "kind": {"const": kind},
            "metadata": {"$ref": self._base + METADATA},
            "spec": self._of_form(spec),
            "status": PLAIN["object"],
        }
        return _object(fields, ["apiVersion", "kind", "metadata"])

    def _of_type(self, name: str) -> Schema:
        facts = self._types[name]
        fields: Schema = {}
        required = list(facts.get("required", []))
        for inline in map(self._of_type, facts.get("with", [])):
            fields |= inline["properties"]
            required += inline["required"]
        for kind, names in facts.get("of", {}).items():
            path = f"io.k8s.api.core.v1.{kind}"
            known = self._definitions[path]["properties"].keys()
            taken = known - set(facts.get("but", [])) if names == "all" else set(names)
            if taken - known:
                raise KeyError(f"{kind} of Kubernetes has no {sorted(taken - known)}")
            fields |= {each: {"$ref": f"{self._base}{path}/properties/{each}"} for each in taken}
        fields |= {each: self._of_form(form) for each, form in facts.get("fields", {}).items()}
        return _object(fields, required)

    def _of_form(self, form: Any) -> Schema:
        if isinstance(form, list):
            return {"type": "array", "items": self._of_form(form[0])}
        if isinstance(form, dict):
            if "each" in form:
                return {"type": "object", "additionalProperties": self._of_form(form["each"])}
            return form | ({"items": self._of_form(form["items"])} if "items" in form else {})
        if form in PLAIN:
            return PLAIN[form]
        if form in self._types:
            return {"$ref": f"#/$defs/{form}"}
        path = QUANTITY if form == "quantity" else "io.k8s.api." + ("" if "." in form else "core.v1.") + form
        if path not in self._definitions:
            raise KeyError(f"Kubernetes has no type {form}")
        return {"$ref": self._base + path}


def _object(fields: Schema, required: list[str]) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": fields, "required": required}


def _unique_keys(_: Any, keys: list[str], items: Any, __: Schema) -> Iterator[jsonschema.ValidationError]:
    """The rule of `x-kubernetes-list-map-keys`, which JSON Schema does not have."""
    seen = set()
    for each in items if isinstance(items, list) else []:
        found = tuple(each.get(key, DEFAULTS.get(key)) for key in keys) if isinstance(each, dict) else ()
        if found and found in seen:
            yield jsonschema.ValidationError(f"{dict(zip(keys, found, strict=True))} comes twice")
        seen.add(found)


def _nulls(value: Any, path: str) -> Iterator[str]:
    """Where null stands: Kubernetes' definitions take it for an optional field, and these CRDs do not."""
    if value is None:
        yield f"{path}: null"
    listed = dict(enumerate(value)) if isinstance(value, list) else value
    for key, each in listed.items() if isinstance(listed, dict) else ():
        yield from _nulls(each, f"{path}.{key}")


def load(facts: dict[str, Any]) -> Schema:
    """Return the definitions of Kubernetes in the version of the facts, with KServe's quantities."""
    package = Path(kubernetes_validate.__file__).parent
    folder = package / f"kubernetes-json-schema/v{facts['kubernetes']}-local-strict"
    kubernetes: Schema = json.loads((folder / "_definitions.json").read_text())
    quantities: list[Schema] = [{"type": "integer"}, {"type": "string", "pattern": facts["quantity"]}]
    kubernetes["$defs"][QUANTITY] = {"anyOf": quantities}
    return kubernetes


def answer(facts: dict[str, Any], objects: list[Any]) -> dict[str, Any]:
    """The problems of each object, as a path and what is wrong there, and the fields of the types."""
    kubernetes = load(facts)
    schemas = Schemas(facts, kubernetes)
    types = schemas.all()
    registry = referencing.Registry().with_contents([(kubernetes["$id"], kubernetes)])
    rules = {"x-kubernetes-list-map-keys": _unique_keys}
    strict = jsonschema.validators.extend(jsonschema.Draft202012Validator, rules)
    problems = []
    for each in objects:
        kind = facts["kinds"][each["kind"]]
        schema = schemas.of_kind(each["kind"], kind["apiVersion"], kind["spec"]) | {"$defs": types}
        errors = strict(schema, registry=registry).iter_errors(each)
        problems.append([f"{error.json_path}: {error.message}" for error in errors] + [*_nulls(each, "$")])
    return {"problems": problems, "fields": {name: sorted(types[name]["properties"]) for name in types}}


if __name__ == "__main__":
    print(json.dumps(answer(**json.load(sys.stdin))))
