"""Handlers written for TorchServe, run unchanged: the archives under `handlers/` on one real server."""

import base64
import importlib.util
import io
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from PIL import Image

from torchere.serving.frontend.grpc.protos.inference_pb2 import PredictionResponse, PredictionsRequest

HANDLERS = Path(__file__).with_name("handlers")


class Line(torch.nn.Module):
    """y = 2x + 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x + 1


class Colours(torch.nn.Module):
    """A class for each colour: its mean."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3))


class Masks(torch.nn.Module):
    """Class 1 everywhere, by far."""

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        first = images[:, :1] * 0
        return {"out": torch.cat([first, first + 50.0], dim=1)}


class Boxes(torch.nn.Module):
    """One sure and one unsure detection in each picture."""

    def forward(self, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        found: list[dict[str, torch.Tensor]] = []
        for _ in range(images.shape[0]):
            boxes = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 1.0, 1.0]])
            found.append(
                {"boxes": boxes, "labels": torch.tensor([1, 0]), "scores": torch.tensor([0.75, 0.25])}
            )
        return found


class Topics(torch.nn.Module):
    """Words 0 and 1 speak for the first topic, all others for the second."""

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        first = (words < 2).sum() * 10.0
        return torch.stack([first, words.numel() * 10.0 - first])[None]


def scripted(model: torch.nn.Module) -> bytes:
    buffer = io.BytesIO()
    with torch.no_grad():
        torch.jit.save(torch.jit.script(model), buffer)
    return buffer.getvalue()


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def digit_weights() -> bytes:
    """A state dict for the class in the archive, as its training script would write it."""
    spec = importlib.util.spec_from_file_location("mnist_training", HANDLERS / "digits" / "mnist.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    weights = module.Net().state_dict()
    weights["fc.bias"][7] = 1000.0
    return saved(weights)


LABELS = '{"0": "red", "1": "green", "2": "blue"}'
VOCABULARY = saved({"it": 0, "is": 1, "ball": 2, "goal": 3, "it is": 4, "is ball": 5, "ball goal": 6})
TOPICS = {"topics.pt": scripted(Topics()), "source_vocab.pt": VOCABULARY}
TOPIC_LABELS = {"index_to_name.json": '{"0": "grammar", "1": "sport"}'}
YAML = {"configFile": "model-config.yaml"}

# Folder (None: no files of its own), generated files, members of the manifest.
ARCHIVES: dict[str, tuple[str | None, dict[str, Any], dict[str, str]]] = {
    "class_form": ("class_form", {}, {"handler": "handler.py"}),
    "function_form": ("function_form", {}, {"handler": "service.py:answer"}),
    "json_tensor": (
        "json_tensor",
        {"line.pt": scripted(Line())},
        {"handler": "json_handler.py", "serializedFile": "line.pt", **YAML},
    ),
    "digits": (
        "digits",
        {"mnist_cnn.pt": digit_weights()},
        {"handler": "mnist_handler.py", "modelFile": "mnist.py", "serializedFile": "mnist_cnn.pt"},
    ),
    "colours": (
        None,
        {"colours.pt": scripted(Colours()), "index_to_name.json": LABELS},
        {"handler": "image_classifier", "serializedFile": "colours.pt"},
    ),
    "segments": (
        None,
        {"masks.pt": scripted(Masks())},
        {"handler": "image_segmenter", "serializedFile": "masks.pt"},
    ),
    "boxes": (
        None,
        {"boxes.pt": scripted(Boxes()), "index_to_name.json": LABELS},
        {"handler": "object_detector", "serializedFile": "boxes.pt"},
    ),
    "texts": (
        None,
        {**TOPICS, **TOPIC_LABELS},
        {"handler": "text_classifier", "serializedFile": "topics.pt"},
    ),
    "topics": (
        "topics",
        {**TOPICS, **TOPIC_LABELS},
        {"handler": "topic_handler.py", "serializedFile": "topics.pt"},
    ),
    "streaming": ("streaming", {}, {"handler": "stream_handler.py"}),
    "micro_batching": ("micro_batching", {}, {"handler": "micro_handler.py", **YAML}),
    "custom_metrics": ("custom_metrics", {}, {"handler": "metrics_handler"}),
    "explaining": (
        "explaining",
        {"line.pt": scripted(Line())},
        {"handler": "explain_handler.py", "serializedFile": "line.pt"},
    ),
    "extras": ("extras", {}, {"handler": "main_handler.py"}),
    "refusing": ("refusing", {}, {"handler": "refusing_handler.py"}),
    "per_item": ("per_item", {}, {"handler": "per_item_handler.py", **YAML}),
    "asynchronous": ("asynchronous", {}, {"handler": "async_handler.py"}),
    "shadowing": ("shadowing", {}, {"handler": "shadow_handler.py:handle"}),
    "twin_a": ("twin_a", {}, {"handler": "handler.py"}),
    "twin_b": ("twin_b", {}, {"handler": "handler.py"}),
    "base64_images": ("base64_images", {}, {"handler": "b64_handler.py"}),
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="module")
def server(pack: Any, start_server: Any) -> Any:
    for name, (folder, generated, model) in ARCHIVES.items():
        files = files_of(HANDLERS / folder) if folder else {}
        pack(name, {**files, **generated}, **model)
    metrics = HANDLERS / "custom_metrics" / "metrics.yaml"
    running = start_server(
        "--disable-token-auth", "--models", "all", properties=f"metrics_config={metrics}\n"
    )
    for name in ARCHIVES:
        running.follow(f"{name}:1.0 is ready")
    return running


def picture(colour: str, size: tuple[int, int] = (256, 256)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def post(server: Any, model: str, body: bytes | str, verb: str = "predictions", **headers: str) -> Any:
    """One request; returns the JSON of its answer, which must be a success."""
    body = body.encode() if isinstance(body, str) else body
    reply = server.call("POST", f"/{verb}/{model}", body, **headers)
    assert reply.status == 200, reply.body
    return reply.json()


def send_json(server: Any, model: str, value: object, verb: str = "predictions") -> Any:
    return post(server, model, json.dumps(value), verb, content_type="application/json")


def grpc_call(server: Any, method: str, model: str, **fields: bytes) -> list[bytes]:
    """The parts of the answer over gRPC."""
    path = f"/org.pytorch.serve.grpc.inference.InferenceAPIsService/{method}"
    message = PredictionsRequest(model_name=model, input=fields)
    with grpc.insecure_channel(server.grpc["inference"]) as channel:
        call = channel.unary_stream(path, PredictionsRequest.SerializeToString, PredictionResponse.FromString)
        return [part.prediction for part in call(message, timeout=60)]


def test_a_class_without_a_base_finds_the_process_it_was_written_for(server: Any) -> None:
    answers = [send_json(server, "class_form", {"value": value}) for value in (1.5, 2)]
    assert [answer["doubled"] for answer in answers] == [3.0, 4.0]
    assert [answer["calls"] for answer in answers] == [1, 2]
    first = answers[0]
    assert (first["name"], first["batch_size"], first["here"]) == ("class_form", 1, True)
    assert first["parallel"] == "false"


def test_a_function_initialises_itself_and_takes_fields_of_forms(server: Any) -> None:
    assert server.call("POST", "/predictions/function_form", b"world").body == b"hello world"
    form = b"name=form+field"
    reply = server.call(
        "POST", "/predictions/function_form", form, content_type="application/x-www-form-urlencoded"
    )
    assert reply.body == b"hello form field"
    assert send_json(server, "function_form", {"b": 1, "a": 2}) == {"keys": ["a", "b"]}
    assert grpc_call(server, "Predictions", "function_form", name=b"gRPC") == [b"hello gRPC"]


def test_a_base_handler_subclass_extends_each_stage_by_super(server: Any) -> None:
    assert send_json(server, "json_tensor", {"x": 4}) == {"y": 81.0}
    part = grpc_call(server, "Predictions", "json_tensor", data=b'{"x": 0.5}')
    assert json.loads(part[0]) == {"y": 11.0}


def test_an_eager_model_with_a_state_dict_answers_with_a_bare_digit(server: Any) -> None:
    assert post(server, "digits", picture("white")) == 7
    assert server.call("POST", "/predictions/digits", picture("black")).body == b"7"


def test_the_built_in_classifier_takes_files_base64_and_grpc(server: Any) -> None:
    assert next(iter(post(server, "colours", picture("red")))) == "red"
    text = base64.b64encode(picture("blue"))
    assert next(iter(post(server, "colours", text, content_type="text/plain"))) == "blue"
    part = grpc_call(server, "Predictions", "colours", data=picture("lime"))
    assert next(iter(json.loads(part[0]))) == "green"


def test_the_built_in_classifier_explains_in_the_shape_of_its_input(server: Any) -> None:
    insight = torch.tensor(post(server, "colours", picture("red"), "explanations"))
    assert insight.shape[-3:] == (3, 224, 224)


def test_the_built_in_segmenter_gives_each_pixel_class_and_probability(server: Any) -> None:
    mask = torch.tensor(post(server, "segments", picture("red")))
    assert mask.shape == (224, 224, 2)
    assert mask[..., 0].eq(1).all()
    assert mask[..., 1].gt(0.99).all()


def test_the_built_in_detector_names_the_sure_boxes(server: Any) -> None:
    assert post(server, "boxes", picture("red")) == [{"green": [1.0, 2.0, 3.0, 4.0], "score": 0.75}]


@pytest.mark.parametrize(("model", "text"), [("texts", "It is ball goal"), ("topics", "<b>It's</b> Goal!")])
def test_texts_are_named_by_their_topic(server: Any, model: str, text: str) -> None:
    answer = post(server, model, text, content_type="text/plain")
    assert list(answer) == ["grammar", "sport"]
    assert (answer["sport"] > answer["grammar"]) == (model == "texts")


def test_a_word_out_of_the_vocabulary_is_told_to_the_log(server: Any) -> None:
    reply = server.call("POST", "/predictions/texts", b"unheard", content_type="text/plain")
    assert (reply.status, reply.json()["message"]) == (503, "Prediction failed")
    server.follow("KeyError: 'unheard'")


def test_an_answer_in_parts_arrives_over_both_protocols(server: Any) -> None:
    reply = server.call("POST", "/predictions/streaming", b"x")
    assert (reply.status, reply.body) == (200, b"one two three")
    assert reply.headers["ts_stream_next"] == "true"
    assert grpc_call(server, "StreamPredictions", "streaming", data=b"x") == [b"one ", b"two ", b"three"]


def test_a_batch_is_pipelined_in_parts(server: Any) -> None:
    with ThreadPoolExecutor(5) as clients:
        answers = list(clients.map(lambda n: post(server, "micro_batching", str(n)), range(5)))
    assert [answer["square"] for answer in answers] == [0, 1, 4, 9, 16]
    assert sorted(answer["part"] for answer in answers) == [1, 2, 2, 2, 2]
    assert len({answer["thread"] for answer in answers}) == 1
    assert answers[0]["thread"] != "MainThread"


def exposed(server: Any, name: str) -> list[str]:
    text = server.call("GET", "/metrics", api="metrics").body.decode()
    return [re.sub(r'Hostname="[^"]*",', "", line) for line in text.splitlines() if line.startswith(name)]


def test_metrics_of_handlers_are_shown_as_the_configuration_declares_them(server: Any) -> None:
    for _ in range(2):
        assert post(server, "custom_metrics", b"four") == {"found": True}
    labels = '{ModelName="custom_metrics",Level="Model",}'
    assert exposed(server, "words_total{") == ['words_total{ModelName="custom_metrics",language="en",} 6.0']
    assert exposed(server, "Calls{") == [f"Calls{labels} 2.0"]
    assert exposed(server, "Preparing{") == [
        'Preparing{step="resize",ModelName="custom_metrics",Level="Model",} 12.5'
    ]
    assert exposed(server, "Picture{") == [f"Picture{labels} 4.0"]
    assert exposed(server, "Full{") == [f"Full{labels} 50.0"]
    assert exposed(server, "Lengths_count{") == [f"Lengths_count{labels} 2.0"]
    assert exposed(server, "Failures{") == ['Failures{ModelName="custom_metrics",Level="Error",} 4.0']
    assert exposed(server, "Old{") == ['Old{ModelName="custom_metrics",} 7.0']
    assert exposed(server, "NobodyDeclared") == []
    server.follow("'NobodyDeclared' of a handler is dropped")


def test_the_configuration_renames_labels_and_leaves_metrics_out(server: Any) -> None:
    send_json(server, "function_form", {})
    assert re.fullmatch(
        r'PredictionTime{model="function_form",Level="Model",} \S+',
        exposed(server, 'PredictionTime{model="function_form')[0],
    )
    assert exposed(server, "Requests2XX{")
    assert exposed(server, "Requests4XX") == exposed(server, "QueueTime") == []
    assert exposed(server, "MemoryUsed{")  # sampled at the start
    assert len(exposed(server, "WorkerLoadTime{")) == len(ARCHIVES)


def test_the_stages_of_a_base_handler_are_timed_when_its_yaml_asks_for_it(server: Any) -> None:
    send_json(server, "json_tensor", {"x": 1})
    for stage in ("preprocess", "inference", "postprocess"):
        name = f'ts_handler_{stage}{{ModelName="json_tensor",Level="Model",'
        assert len(exposed(server, name)) == 1
    assert exposed(server, 'ts_handler_inference{ModelName="colours"') == []
    assert len(exposed(server, 'HandlerTime{ModelName="json_tensor"')) == 1
    assert exposed(server, 'HandlerTime{ModelName="class_form"') == []


def test_the_load_of_each_model_is_shown(server: Any) -> None:
    send_json(server, "function_form", {})
    assert exposed(server, 'torchere_saturation{model="twin_a"') == [
        'torchere_saturation{model="twin_a",version="1.0",} 0.0'
    ]
    assert exposed(server, 'torchere_executors{model="twin_a"') == [
        'torchere_executors{model="twin_a",version="1.0",state="ready",} 1.0'
    ]
    assert exposed(server, "torchere_inflight") == ["torchere_inflight 0.0"]
    stages = exposed(server, 'torchere_stage_seconds_total{model="function_form"')
    assert [re.search(r'stage="(\w+)"', line)[1] for line in stages] == ["queue", "transfer", "handler"]


def test_explanations_call_get_insights(server: Any) -> None:
    answer = send_json(server, "explaining", {"x": [1.0, 2.0]}, "explanations")
    assert answer == {"of": {"x": [1.0, 2.0]}, "target": 0, "importances": [1.0, 2.0]}
    assert send_json(server, "explaining", {"x": [1.0]}) == [3.0]


def test_extra_files_are_imported_and_opened_where_handlers_look_for_them(server: Any) -> None:
    assert post(server, "extras", b"x") == {
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
        ("exit", 503, "Prediction failed"),
        ("short", 503, "number of batch response mismatched"),
        ("type", 503, "Invalid model predict output"),
    ],
)
def test_what_a_handler_raises_has_its_status_and_text(
    server: Any, wish: str, status: int, message: str
) -> None:
    reply = server.call("POST", "/predictions/refusing", wish.encode())
    assert (reply.status, reply.json()["message"]) == (status, message)
    assert server.call("POST", "/predictions/refusing", b"well").body == b"fine"


def test_each_request_of_a_batch_has_its_own_status_and_headers(server: Any) -> None:
    def ask(number: int) -> Any:
        return server.call("POST", "/predictions/per_item", b"%d" % number, X_Client=f"c{number}")

    with ThreadPoolExecutor(3) as clients:
        good, bad, other = clients.map(ask, (1, -2, 3))
    assert (good.status, bad.status, other.status) == (200, 422, 200)
    assert [reply.headers["x-number"] for reply in (good, bad, other)] == ["1", "-2", "3"]
    assert good.headers["content-type"] == "text/csv"
    assert good.body == b"1,3,c1,True"
    assert other.body == b"3,3,c3,True"


def test_a_coroutine_runs_on_one_loop_for_all_calls(server: Any) -> None:
    for text in ("one", "two"):
        assert post(server, "asynchronous", text) == {"loop": True, "got": text}


def test_an_archive_may_hold_a_json_of_its_own(server: Any) -> None:
    assert post(server, "shadowing", b"x") == {"mine": "the json of the archive", "torch": 1.0}


def test_two_archives_may_use_the_same_module_names(server: Any) -> None:
    for _ in range(2):
        assert server.call("POST", "/predictions/twin_a", b"x").body == b"<twin a>"
        assert server.call("POST", "/predictions/twin_b", b"x").body == b"[twin b]"


def test_pictures_come_as_files_base64_data_urls_and_form_fields(server: Any) -> None:
    raw = picture("red", (8, 4))
    encoded = base64.b64encode(raw).decode()
    size = {"size": [8, 4], "caption": ""}
    assert post(server, "base64_images", raw) == size
    assert post(server, "base64_images", encoded, content_type="text/plain") == size
    assert send_json(server, "base64_images", {"image": f"data:image/png;base64,{encoded}"}) == size
    form = (
        b'--b\r\nContent-Disposition: form-data; name="data"; filename="r.png"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n" + raw + b"\r\n"
        b'--b\r\nContent-Disposition: form-data; name="caption"\r\n'
        b"Content-Type: text/plain\r\n\r\na red one\r\n--b--\r\n"
    )
    answer = post(server, "base64_images", form, content_type="multipart/form-data; boundary=b")
    assert answer == {"size": [8, 4], "caption": "a red one"}


def test_custom_handlers_have_processes_and_built_in_ones_threads(server: Any) -> None:
    for name, (folder, _, _) in ARCHIVES.items():
        workers = server.call("GET", f"/models/{name}", api="management").json()[0]["workers"]
        in_server = {worker["pid"] for worker in workers} == {server.process.pid}
        assert in_server == (folder is None), name


INSTANCES = {"instances": [[1, 2], [3, 4]]}
V2 = {"id": "7", "inputs": [{"name": "in", "shape": [2], "datatype": "INT64", "data": [1, 2]}]}


@pytest.mark.parametrize(
    ("envelope", "request_body", "answer"),
    [
        ("body", [1, 2], b"[\n  3,\n  5\n]"),
        ("json", INSTANCES, b'{"predictions": [[3, 5], [7, 9]]}'),
        ("kserve", INSTANCES, {"predictions": [[3, 5], [7, 9]]}),
        (
            "kservev2",
            V2,
            {
                "id": "7",
                "model_name": "line",
                "model_version": "1.0",
                "outputs": [{"name": "in", "datatype": "INT64", "data": [3, 5], "shape": [2]}],
            },
        ),
    ],
)
def test_an_envelope_stands_before_the_base_handler(
    pack: Any, start_server: Any, envelope: str, request_body: Any, answer: Any
) -> None:
    pack("line", {"line.pt": scripted(Line())}, handler="base_handler", serializedFile="line.pt")
    running = start_server(
        "--disable-token-auth", "--models", "line", properties=f"service_envelope={envelope}\n"
    )
    running.follow("line:1.0 is ready")
    body = json.dumps(request_body).encode()
    reply = running.call("POST", "/predictions/line", body, content_type="application/json")
    running.stop()
    assert reply.status == 200, reply.body
    assert answer in (reply.body, reply.json())
