"""Prints the fields of types of KServe's SDK, which are generated from the Go types that make its CRDs.

    python kserve_types.py < NAMES      in the environment of KServe's SDK

Reads a JSON list of names without their versions; prints {name: its fields}, with null for a name that
the SDK does not have.
"""

from __future__ import annotations

import json
import sys

import kserve.models

PREFIXES = ("V1beta1", "V1alpha1")  # in this order: v1alpha1 has another ModelSpec than an InferenceService


def fields(name: str) -> list[str] | None:
    """Return the fields of a type by their names in JSON."""
    for prefix in PREFIXES:
        if (found := getattr(kserve.models, prefix + name, None)) is not None:
            return sorted(found.attribute_map.values())
    return None


if __name__ == "__main__":
    print(json.dumps({name: fields(name) for name in json.load(sys.stdin)}))
