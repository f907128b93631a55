"""The product never runs code out of data: no pickle, no eval, no shell, and YAML by the safe loader."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEVER = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open"),
    *("eval", "exec", "os.system", "os.popen", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"),
    *("numpy.load", "np.load", "joblib.load", "dill.loads", "cloudpickle.loads", "jsonpickle.decode"),
}
# Calls that are safe with a keyword of this value only.
SAFE_WITH = {
    "torch.load": ("weights_only", True),
    "np.lib.format.read_array": ("allow_pickle", False),
}


def calls(folder: str) -> Iterator[tuple[str, str, ast.Call]]:
    """Every call of a dotted name in a folder: its place, the name and the node."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func), node


@pytest.mark.parametrize("folder", ["serving", "handlers", "client"])
def test_nothing_runs_code_out_of_data(folder: str) -> None:
    found = []
    for place, name, call in calls(folder):
        keywords = {each.arg: ast.literal_eval(each.value) for each in call.keywords if _is_plain(each.value)}
        if keywords.get("shell") is True or name in NEVER:
            found.append(f"{place}: {name}")
        if name in SAFE_WITH:
            keyword, value = SAFE_WITH[name]
            if keywords.get(keyword) is not value:
                found.append(f"{place}: {name} without {keyword}={value}")
        if name == "yaml.load" and not any(
            each.arg == "Loader" and ast.unparse(each.value) in ("_Loader", "yaml.SafeLoader")
            for each in call.keywords
        ):
            found.append(f"{place}: {name} without a safe loader")
    assert found == []


def _is_plain(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)
