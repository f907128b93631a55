"""Handlers written for TorchServe, run unchanged: the archives in the folders beside this file."""

import base64
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch


def test_a_class_without_a_base_finds_the_process_it_was_written_for(client: Any) -> None:
    answers = [client.send_json("class_form", {"value": value}) for value in (1.5, 2)]
    assert [answer["doubled"] for answer in answers] == [3.0, 4.0]
    assert [answer["calls"] for answer in answers] == [1, 2]
    first = answers[0]
    assert (first["name"], first["batch_size"], first["here"]) == ("class_form", 1, True)
    assert first["parallel"] == "false"


def test_a_function_initialises_itself_and_takes_fields_of_forms(client: Any) -> None:
    assert client.call("function_form", b"world").body == b"hello world"
    form = b"name=form+field"
    reply = client.call("function_form", form, content_type="application/x-www-form-urlencoded")
    assert reply.body == b"hello form field"
    assert client.send_json("function_form", {"b": 1, "a": 2}) == {"keys": ["a", "b"]}
    assert client.grpc("Predictions", "function_form", name=b"gRPC") == [b"hello gRPC"]


def test_a_base_handler_subclass_extends_each_stage_by_super(client: Any) -> None:
    assert client.send_json("json_tensor", {"x": 4}) == {"y": 81.0}
    part = client.grpc("Predictions", "json_tensor", data=b'{"x": 0.5}')
    assert json.loads(part[0]) == {"y": 11.0}


def test_an_eager_model_with_a_state_dict_answers_with_a_bare_digit(client: Any, picture: Any) -> None:
    assert client.post("digits", picture("white")) == 7
    assert client.call("digits", picture("black")).body == b"7"


def test_the_built_in_classifier_takes_files_base64_and_grpc(client: Any, picture: Any) -> None:
    assert next(iter(client.post("colours", picture("red")))) == "red"
    text = base64.b64encode(picture("blue"))
    assert next(iter(client.post("colours", text, content_type="text/plain"))) == "blue"
    part = client.grpc("Predictions", "colours", data=picture("lime"))
    assert next(iter(json.loads(part[0]))) == "green"


def test_the_built_in_classifier_explains_in_the_shape_of_its_input(client: Any, picture: Any) -> None:
    insight = torch.tensor(client.post("colours", picture("red"), "explanations"))
    assert insight.shape[-3:] == (3, 224, 224)


def test_the_built_in_segmenter_gives_each_pixel_class_and_probability(client: Any, picture: Any) -> None:
    mask = torch.tensor(client.post("segments", picture("red")))
    assert mask.shape == (224, 224, 2)
    assert mask[..., 0].eq(1).all()
    assert mask[..., 1].gt(0.99).all()


def test_the_built_in_detector_names_the_sure_boxes(client: Any, picture: Any) -> None:
    assert client.post("boxes", picture("red")) == [{"green": [1.0, 2.0, 3.0, 4.0], "score": 0.75}]


@pytest.mark.parametrize(("model", "text"), [("texts", "It is ball goal"), ("topics", "<b>It's</b> Goal!")])
def test_texts_are_named_by_their_topic(client: Any, model: str, text: str) -> None:
    answer = client.post(model, text, content_type="text/plain")
    assert list(answer) == ["grammar", "sport"]
    assert (answer["sport"] > answer["grammar"]) == (model == "texts")


def test_a_word_out_of_the_vocabulary_is_told_to_the_log(client: Any) -> None:
    reply = client.call("texts", b"unheard", content_type="text/plain")
    assert (reply.status, reply.json()["message"]) == (503, "Prediction failed")
    client.server.follow("KeyError: 'unheard'")


def test_an_answer_in_parts_arrives_over_both_protocols(client: Any) -> None:
    reply = client.call("streaming", b"x")
    assert (reply.status, reply.body) == (200, b"one two three")
    assert reply.headers["ts_stream_next"] == "true"
    assert client.grpc("StreamPredictions", "streaming", data=b"x") == [b"one ", b"two ", b"three"]


def test_a_batch_is_pipelined_in_parts(client: Any) -> None:
    with ThreadPoolExecutor(5) as clients:
        answers = list(clients.map(lambda n: client.post("micro_batching", str(n)), range(5)))
    assert [answer["square"] for answer in answers] == [0, 1, 4, 9, 16]
    assert sorted(answer["part"] for answer in answers) == [1, 2, 2, 2, 2]
    assert len({answer["thread"] for answer in answers}) == 1
    assert answers[0]["thread"] != "MainThread"


def test_metrics_of_handlers_are_shown_as_the_configuration_declares_them(client: Any) -> None:
    for _ in range(2):
        assert client.post("custom_metrics", b"four") == {"found": True}
    labels = '{ModelName="custom_metrics",Level="Model",}'
    assert client.exposed("words_total{") == ['words_total{ModelName="custom_metrics",language="en",} 6.0']
    assert client.exposed("Calls{") == [f"Calls{labels} 2.0"]
    assert client.exposed("Preparing{") == [
        'Preparing{step="resize",ModelName="custom_metrics",Level="Model",} 12.5'
    ]
    assert client.exposed("Picture{") == [f"Picture{labels} 4.0"]
    assert client.exposed("Full{") == [f"Full{labels} 50.0"]
    assert client.exposed("Lengths_count{") == [f"Lengths_count{labels} 2.0"]
    assert client.exposed("Failures{") == ['Failures{Level="Error",} 4.0']
    assert client.exposed("Old{") == ['Old{ModelName="custom_metrics",} 7.0']
    assert client.exposed("NobodyDeclared") == []
    client.server.follow("'NobodyDeclared' of a handler is dropped")


def test_values_that_a_handler_or_its_child_writes_as_torchserves_lines_count(client: Any) -> None:
    def values() -> list[float]:
        lines = [client.exposed(f'{name}{{kind="old",}}') for name in ("Logged", "OfAChild", "Printed")]
        return [float(line.rpartition(" ")[2]) for (line,) in lines]

    def post(body: bytes) -> None:
        assert client.post("custom_metrics", body) == {"found": True}
        client.server.follow(f"after the values of {body!r}")

    post(b"first")
    logged, of_a_child, printed = values()
    post(b"second")
    assert values() == [logged + 1, of_a_child + 2, printed] == [logged + 1, of_a_child + 2, 5]
    assert "[METRICS]" not in client.server.log()


def test_the_configuration_renames_labels_and_leaves_metrics_out(client: Any, archives: Any) -> None:
    client.send_json("function_form", {})
    assert re.fullmatch(
        r'PredictionTime{model="function_form",Level="Model",} \S+',
        client.exposed('PredictionTime{model="function_form')[0],
    )
    assert client.exposed("Requests2XX{")
    assert client.exposed("Requests4XX") == client.exposed("QueueTime") == []
    assert client.exposed("MemoryUsed{")  # sampled at the start
    assert len(client.exposed("WorkerLoadTime{")) == len(archives)


def test_the_stages_of_a_base_handler_are_timed_when_its_yaml_asks_for_it(client: Any) -> None:
    client.send_json("json_tensor", {"x": 1})
    for stage in ("preprocess", "inference", "postprocess"):
        name = f'ts_handler_{stage}{{ModelName="json_tensor",Level="Model",'
        assert len(client.exposed(name)) == 1
    assert client.exposed('ts_handler_inference{ModelName="colours"') == []
    assert len(client.exposed('HandlerTime{ModelName="json_tensor"')) == 1
    assert client.exposed('HandlerTime{ModelName="class_form"') == []


def test_the_load_of_each_model_is_shown(client: Any) -> None:
    client.send_json("function_form", {})
    (saturation,) = client.exposed('torchere_saturation{model="twin_a",version="1.0"')
    assert 0 <= float(saturation.split()[-1]) <= 1  # other tests may have asked it a moment ago
    assert client.exposed('torchere_executors{model="twin_a"') == [
        'torchere_executors{model="twin_a",version="1.0",state="ready",} 1.0'
    ]
    assert client.exposed("torchere_inflight") == ["torchere_inflight 0.0"]
    stages = client.exposed('torchere_stage_duration_seconds_count{model="function_form"')
    found = re.findall(r'stage="(\w+)"', "".join(stages))
    assert found == ["receive", "decode", "queue", "transfer", "handler", "encode", "send"]


def test_explanations_call_get_insights(client: Any) -> None:
    answer = client.send_json("explaining", {"x": [1.0, 2.0]}, "explanations")
    assert answer == {"of": {"x": [1.0, 2.0]}, "target": 0, "importances": [1.0, 2.0]}
    assert client.send_json("explaining", {"x": [1.0]}) == [3.0]


def test_extra_files_are_imported_and_opened_where_handlers_look_for_them(client: Any) -> None:
    assert client.post("extras", b"x") == {
        "label": {"owl": 1.0},
        "helped": "HI!",
        "word": "badger",
        "longest": "badger",
        "same": True,
        "setting": 0.5,
    }


@pytest.mark.parametrize(
    ("wish", "status", "message"),
    [
        ("418", 418, "not today"),
        ("503", 503, "not today"),
        ("default", 500, "plain"),
        ("bug", 503, "Prediction failed"),
        ("memory", 507, "Out of resources"),
        ("exit", 500, "Worker died."),
        ("short", 503, "number of batch response mismatched"),
        ("type", 503, "Invalid model predict output"),
    ],
)
def test_what_a_handler_raises_has_its_status_and_text(
    client: Any, wish: str, status: int, message: str
) -> None:
    reply = client.call("refusing", wish.encode())
    assert (reply.status, reply.json()["message"]) == (status, message)
    assert client.call("refusing", b"well").body == b"fine"


def test_each_request_of_a_batch_has_its_own_status_and_headers(client: Any) -> None:
    def ask(number: int) -> Any:
        return client.call("per_item", b"%d" % number, X_Client=f"c{number}")

    with ThreadPoolExecutor(3) as clients:
        good, bad, other = clients.map(ask, (1, -2, 3))
    assert (good.status, bad.status, other.status) == (200, 422, 200)
    assert [reply.headers["x-number"] for reply in (good, bad, other)] == ["1", "-2", "3"]
    assert good.headers["content-type"] == "text/csv"
    assert good.body == b"1,3,c1,True"
    assert other.body == b"3,3,c3,True"


def test_a_coroutine_runs_on_one_loop_for_all_calls(client: Any) -> None:
    for text in ("one", "two"):
        assert client.post("asynchronous", text) == {"loop": True, "got": text}


def test_an_archive_may_hold_a_json_of_its_own(client: Any) -> None:
    assert client.post("shadowing", b"x") == {"mine": "the json of the archive", "torch": 1.0}


def test_two_archives_may_use_the_same_module_names(client: Any) -> None:
    for _ in range(2):
        assert client.call("twin_a", b"x").body == b"<twin a>"
        assert client.call("twin_b", b"x").body == b"[twin b]"


def test_pictures_come_as_files_base64_data_urls_and_form_fields(client: Any, picture: Any) -> None:
    raw = picture("red", (8, 4))
    encoded = base64.b64encode(raw).decode()
    size = {"size": [8, 4], "caption": ""}
    assert client.post("base64_images", raw) == size
    assert client.post("base64_images", encoded, content_type="text/plain") == size
    assert client.send_json("base64_images", {"image": f"data:image/png;base64,{encoded}"}) == size
    form = (
        b'--b\r\nContent-Disposition: form-data; name="data"; filename="r.png"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n" + raw + b"\r\n"
        b'--b\r\nContent-Disposition: form-data; name="caption"\r\n'
        b"Content-Type: text/plain\r\n\r\na red one\r\n--b--\r\n"
    )
    answer = client.post("base64_images", form, content_type="multipart/form-data; boundary=b")
    assert answer == {"size": [8, 4], "caption": "a red one"}


def test_custom_handlers_have_processes_and_built_in_ones_threads(client: Any, archives: Any) -> None:
    for name, (folder, _, _) in archives.items():
        described = client.server.call("GET", f"/models/{name}", api="management").json()[0]
        workers = described["workers"]
        pids = {worker["pid"] for worker in workers}
        assert client.server.process.pid not in pids
        in_threads = folder is None and not workers[0]["gpu"]
        assert described["torchere"]["isolation"] == ("thread" if in_threads else "process"), name
        assert len(pids) == (1 if in_threads else len(workers)), name
