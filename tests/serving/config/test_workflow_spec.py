"""Specifications of workflows: what they mean, and which are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.config.workflow_spec import StepSettings, check_functions, read_workflow_spec
from torchere.serving.errors import InvalidGraph, InvalidWorkflow

MODELS = "models:\n  m:\n    url: m.mar\n"


def test_a_model_inherits_the_settings_above_it_and_overrides_them():
    spec = read_workflow_spec(
        "models:\n  min-workers: 2\n  max-workers: 3\n  batch-size: 4\n  max-batch-delay: 5\n"
        "  retry-attempts: 6\n  timeout-ms: 7\n  m:\n    url: m.mar\n    batch-size: 9\n"
        "dag:\n  before: [m]\n"
    )
    assert spec.steps["m"] == StepSettings("m.mar", 2, 3, 9, 5, 6, 7)
    assert spec.steps["before"] == StepSettings(None, 1, 1, 1, 0, 6, 7)  # a function: one worker, one request
    assert spec.functions == ("before",)


def test_the_defaults_are_those_of_torchserve():
    spec = read_workflow_spec(f"{MODELS}dag:\n  m: []\n")
    assert spec.steps["m"] == StepSettings("m.mar", 1, 1, 1, 50, 1, 10_000)


def test_parents_come_first_and_keep_the_order_of_the_graph():
    spec = read_workflow_spec("dag:\n  start: [left, right]\n  right: [end]\n  left: [end, more]\n")
    order = list(spec.steps)
    assert order[0] == "start"
    assert order.index("left") < order.index("end")
    assert spec.parents["end"] == ("right", "left")
    assert sorted(spec.leaves) == ["end", "more"]


def test_a_model_outside_the_graph_is_unused():
    spec = read_workflow_spec(f"{MODELS}  other:\n    url: o.mar\ndag:\n  m: []\n")
    assert (list(spec.steps), spec.unused) == (["m"], ("other",))


def test_an_unknown_setting_of_a_model_is_ignored_with_the_nearest_known_one():
    spec = read_workflow_spec(
        f"{MODELS}    max-worker: 5\n    response-timeout: 30\n    1: x\ndag:\n  m: []\n"
    )
    assert spec.steps["m"] == StepSettings("m.mar")
    assert spec.ignored == (
        "'max-worker' of the model 'm' (did you mean max-workers?)",
        "'response-timeout' of the model 'm'",
        "1 of the model 'm'",
    )


def test_of_many_unknown_settings_the_first_are_named():
    many = "".join(f"    key{number}: 1\n" for number in range(50))
    spec = read_workflow_spec(f"{MODELS}{many}dag:\n  m: []\n")
    assert (len(spec.ignored), spec.ignored[-1]) == (11, "and 40 more")


def test_a_url_that_is_misspelt_is_said_where_it_is_missing():
    with pytest.raises(InvalidWorkflow, match="has no url") as refused:
        read_workflow_spec("models:\n  m:\n    urls: m.mar\ndag:\n  m: []\n")
    assert refused.value.detail == "unknown settings: 'urls' of the model 'm' (did you mean url?)"


@pytest.mark.parametrize(
    ("dag", "message", "told"),
    [
        ("  a: [b]\n  b: [a]\n", "DAG should have only one start node", "a -> b -> a"),
        ("  a: [b]\n  b: [c]\n  c: [b]\n", "Not a valid DAG", "b -> c -> b"),
        ("  a: [c]\n  b: [c]\n", "DAG should have only one start node", "found 2: a, b"),
        ("  a: [a]\n", "DAG should have only one start node", "a -> a"),
        ("  a: [b, b]\n", "loop exception", "a lists a child twice"),
    ],
)
def test_a_graph_that_is_none_is_refused_in_torchserves_words_with_the_reason(dag, message, told):
    with pytest.raises(InvalidGraph) as refused:
        read_workflow_spec(f"dag:\n{dag}")
    assert refused.value.message == message
    assert told in refused.value.detail


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models: [", "Failed to parse yaml."),
        ("just text", "Failed to parse yaml."),
        (MODELS, "a mapping called 'dag': it is missing"),
        (f"{MODELS}dag:\n", "a mapping called 'dag': it is missing"),
        (f"{MODELS}dag: {{}}\n", "a mapping called 'dag': found {}"),
        (f"{MODELS}dag:\n  m: other\n", "expected a list of node names"),
        (f"{MODELS}dag:\n  m: [1]\n", "expected a list of node names"),
        ("dag:\n  m: [my step]\n", "The node 'my step' in 'dag' contains special characters"),
        ("dag:\n  a/b: []\n", "The node 'a/b' in 'dag' contains special characters"),
        ("dag:\n  '': []\n", "The node '' in 'dag' contains special characters"),
        ("models:\n  m:\n    batch-size: 2\ndag:\n  m: []\n", "The model 'm' has no url"),
        ("models:\n  m:\n    url: 3\ndag:\n  m: []\n", "url of the model 'm' is 3"),
        ("models:\n  workers: 2\ndag:\n  m: []\n", "'workers' in 'models' is neither a setting nor a model"),
        ("models:\n  batch-size: '2'\ndag:\n  m: []\n", "batch-size of models is '2'"),
        ("models:\n  batch-size: 0\ndag:\n  m: []\n", "a whole number from 1 to 65536"),
        ("models:\n  timeout-ms: true\ndag:\n  m: []\n", "timeout-ms of models is True"),
        (
            "dag:\n" + "".join(f"  s{at}: [s{at + 1}]\n" for at in range(100)),
            "101 nodes; expected at most 100",
        ),
    ],
)
def test_an_unusable_specification_is_refused_with_what_was_found(text, told):
    with pytest.raises(InvalidWorkflow) as refused:
        read_workflow_spec(text)
    assert told in refused.value.message


def functions(*names: str):
    return read_workflow_spec("dag:\n  " + ": []\n  ".join(names) + ": []\n")


@pytest.mark.parametrize(
    "source",
    [
        "def f(data, context): return data",
        "async def f(data, context): return data",
        "from elsewhere import f",
        "from elsewhere import g as f",
        "from elsewhere import *",
        "f = lambda data, context: data",
        "if True:\n    def f(data, context): return data",  # known only by running it
    ],
)
def test_a_function_may_be_defined_in_any_way(source):
    check_functions(functions("f"), "h.py", source)


@pytest.mark.parametrize(
    ("handler", "source", "told"),
    [
        (
            "h.py",
            "def g(data, context): return data\nx = 1",
            "'f' is neither in 'models' nor a function of h.py",
        ),
        ("h.py", "import f", "'f' is neither in 'models' nor a function of h.py"),
        ("h.py", "def f(:", "h.py is not valid Python"),
        (None, "", "the workflow has no handler"),
    ],
)
def test_a_function_that_is_not_there_is_refused(handler, source, told):
    with pytest.raises(InvalidWorkflow) as refused:
        check_functions(functions("f"), handler, source)
    assert told in refused.value.message


@given(st.text(max_size=200))
def test_any_text_is_a_specification_or_refused(text):
    try:
        spec = read_workflow_spec(text)
    except InvalidWorkflow:
        return
    assert spec.leaves
