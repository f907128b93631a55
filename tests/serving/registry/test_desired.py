"""What is loaded at the start, read from settings alone."""

import pytest

from torchere.serving.config.model_settings import Asked
from torchere.serving.config.server_settings import ServerSettings, SnapshotModel, SnapshotWorkflow
from torchere.serving.errors import InvalidSnapshot
from torchere.serving.registry.desired import Wanted, check_snapshot, startup_models, startup_workflows

ENTRY: dict[str, object] = {
    "minWorkers": 0,
    "maxWorkers": 2,
    "batchSize": 4,
    "maxBatchDelay": 50,
    "responseTimeout": 60,
    "runtimeType": "python3",
}


def restored(**changes: object) -> SnapshotModel:
    return SnapshotModel("m", "1.0", "m.mar", True, {**ENTRY, **changes})


def test_items_may_name_the_model_and_all_is_the_whole_store() -> None:
    def unreadable() -> list[str]:
        raise OSError("it is not asked for")

    named = startup_models(ServerSettings(load_models=("a=x.mar", "y.mar"), default_executors=3), unreadable)
    assert [(wanted.name, wanted.url, wanted.asked.executors) for wanted in named] == [
        ("a", "x.mar", 3),
        (None, "y.mar", 3),
    ]
    everything = startup_models(ServerSettings(load_models=("ALL",)), lambda: ["b.mar", "folder"])
    assert [wanted.url for wanted in everything] == ["b.mar", "folder"]
    assert all(wanted.at_startup for wanted in everything)


def test_workflows_of_the_start_are_named_as_models_are_and_all_is_the_whole_workflow_store() -> None:
    kept = SnapshotWorkflow("kept.war", "kept")
    server = ServerSettings(snapshot_workflows=(kept,), load_workflows=("a=x.war", "https://h/y.war?z=1"))
    named = [SnapshotWorkflow("x.war", "a"), SnapshotWorkflow("https://h/y.war?z=1")]
    assert startup_workflows(server, list) == [kept, *named]
    everything = startup_workflows(ServerSettings(load_workflows=("all",)), lambda: ["a=b.war"])
    assert everything == [SnapshotWorkflow("a=b.war", only_if_stored=True)]


def test_a_workflow_of_the_whole_store_that_never_loaded_is_wanted_while_its_file_is_there() -> None:
    there, gone = (SnapshotWorkflow(f"{name}.war", only_if_stored=True) for name in ("there", "gone"))
    assert there.entry() == {"workflowUrl": "there.war", "onlyIfStored": True}
    server = ServerSettings(snapshot_workflows=(there, gone, SnapshotWorkflow("served.war", "served")))
    assert startup_workflows(server, lambda: ["there.war"]) == [
        there,
        SnapshotWorkflow("served.war", "served"),
    ]


@pytest.mark.parametrize(
    ("item", "name", "url"),
    [
        ("https://h/a.mar?signature=x=y", None, "https://h/a.mar?signature=x=y"),
        ("a=https://h/a.mar?signature=x", "a", "https://h/a.mar?signature=x"),
        ("=a.mar", None, "a.mar"),
    ],
)
def test_the_query_of_a_url_is_not_a_name(item: str, name: str | None, url: str) -> None:
    (wanted,) = startup_models(ServerSettings(load_models=(item,)), list)
    assert (wanted.name, wanted.url) == (name, url)


def test_a_restored_model_has_what_the_snapshot_says() -> None:
    (wanted,) = startup_models(ServerSettings(snapshot_models=(restored(),)), list)
    assert (wanted.name, wanted.url, wanted.runtime, wanted.handler) == ("m", "m.mar", "python3", None)
    assert wanted.executor_range == (0, 2)
    assert (wanted.asked.batch_size, wanted.asked.max_batch_delay_ms, wanted.asked.executors) == (4, 50, 0)
    assert (wanted.asked.response_timeout_s, wanted.asked.startup_timeout_s) == (60, None)
    assert wanted.asked.restored


def test_a_restored_model_that_never_waited_does_not_begin_to() -> None:
    (wanted,) = startup_models(ServerSettings(snapshot_models=(restored(maxBatchDelay=0),)), list)
    assert wanted.asked.max_batch_delay_ms == 0


def test_a_range_that_is_upside_down_is_read_as_its_lower_end() -> None:
    (wanted,) = startup_models(ServerSettings(snapshot_models=(restored(minWorkers=3),)), list)
    assert wanted.executor_range == (3, 3)


def test_fields_of_ours_come_back() -> None:
    model = restored(torchere={"handler": "other.py", "path": "/opt/ml/model"})
    (wanted,) = startup_models(ServerSettings(snapshot_models=(model,)), list)
    assert (wanted.handler, wanted.url) == ("other.py", "/opt/ml/model")


@pytest.mark.parametrize("ours", [{}, {"torchere": "theirs"}, {"torchere": {"handler": 3, "path": []}}])
def test_keys_that_torchserve_ignores_are_the_users_own(ours: dict[str, object]) -> None:
    model = restored(handler={"name": "x"}, path="/predictions/m", missing=[1], **ours)
    (wanted,) = startup_models(ServerSettings(snapshot_models=(model,)), list)
    assert (wanted.handler, wanted.url) == (None, "m.mar")


def test_a_snapshot_with_a_missing_archive_is_refused_by_name() -> None:
    check_snapshot((restored(),), lambda name, trusted: True)
    with pytest.raises(InvalidSnapshot) as caught:
        check_snapshot(
            (restored(), restored(torchere={"path": "/gone"})), lambda name, trusted: name == "m.mar"
        )
    assert "not in the model store: /gone (m 1.0)" in caught.value.message
    assert "--ncs" in caught.value.detail


@pytest.mark.parametrize(("asked", "gpus", "executors"), [(0, 2, 2), (3, 2, 3)])
def test_a_model_that_says_nothing_gets_an_executor_for_each_gpu(
    asked: int, gpus: int, executors: int
) -> None:
    server = ServerSettings(load_models=("a.mar",), default_executors=asked)
    assert [wanted.asked.executors for wanted in startup_models(server, list, gpus)] == [executors]


def test_the_url_of_a_step_is_no_operators_own_even_when_a_start_restores_its_workflow() -> None:
    assert Wanted("http://host/m.mar", Asked(), at_startup=True).by_operator
    assert not Wanted("http://host/m.mar", Asked(), at_startup=True, workflow="w").by_operator
