"""What TorchServe's tests ask by single requests, one a row, and what they expect.

The facts are those of ModelServerTest.java, of the Postman collections and of test_gRPC_management_apis.py;
models and words are our own. Rows of a file run in their order, against one server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

JAVA = "ModelServerTest.java"
MANAGEMENT = "management_data.json"
INFERENCE = "inference_data.json"
FORM = "application/x-www-form-urlencoded"
OCTETS = "application/octet-stream"
NOT_FOUND = "Requested resource is not found, please refer to API document."
NOT_ALLOWED = "Requested method is not allowed, please refer to API document."
FOUR, FIVE = (400, 404), (500, 507)


@dataclass(frozen=True, slots=True)
class Row:
    """One request. `{downloads}` in the path is the URL of archives outside the store.

    Attributes:
        file: the test file upstream.
        status: those that it accepts.
        holds: text that the body has to hold.
    """

    file: str
    title: str
    method: str
    path: str
    status: tuple[int, ...] = (200,)
    holds: str = ""
    body: bytes | None = None
    type: str = "application/json"
    api: str = "management"
    lacks: str = ""
    header: tuple[str, str] = ("", "")


def _manage(title: str, method: str, path: str, status: int = 200, holds: str = "", **more: object) -> Row:
    return Row(JAVA, title, method, path, (status,), holds, **more)  # type: ignore[arg-type]


def _infer(title: str, path: str, status: int = 200, holds: str = "OK", **more: object) -> Row:
    more = {"method": "POST", "body": b'{"data": "test"}', **more}
    return Row(JAVA, title, path=path, status=(status,), holds=holds, api="inference", **more)  # type: ignore[arg-type]


def _get(title: str, path: str, status: int, holds: str, **more: object) -> Row:
    return _infer(title, path, status, holds, method="GET", body=None, **more)


NO_VERSION = "Model version: 1.3.1 does not exist for model: versioned"
NO_MODEL = "Model not found: none"
SCALED = "Workers scaled to 1 for model: one"
REGISTER = "/models?url=ok.mar&model_name="
LOADED = "&initial_workers=1&synchronous=true"
MULTIPART = (
    b'--x\r\nContent-Disposition: form-data; name="model_name"\r\n\r\none\r\n'
    b'--x\r\nContent-Disposition: form-data; name="data"; filename="t.txt"\r\n'
    b"Content-Type: text/plain\r\n\r\ntest\r\n--x--\r\n"
)
FORM_OF_PARTS: dict[str, Any] = {"body": MULTIPART, "type": "multipart/form-data; boundary=x"}
JAVA_ROWS = (
    _get("ping", "/ping", 200, "Healthy"),
    Row(JAVA, "description of inference", "OPTIONS", "/", (200,), '"openapi": "3.0.1"', api="inference"),
    Row(JAVA, "description of management", "OPTIONS", "/", (200,), '"openapi": "3.0.1"'),
    _get("api-description", "/api-description", 200, '"openapi": "3.0.1"'),
    _manage(
        "register without workers",
        "POST",
        f"{REGISTER}one",
        200,
        '"one\\" Version: 1.11 registered with 0',
    ),
    Row(
        JAVA,
        "description of a model",
        "OPTIONS",
        "/predictions/one",
        (200,),
        '"operationId"',
        api="inference",
    ),
    _manage("scale", "PUT", "/models/one?min_worker=1&synchronous=true", 200, SCALED),
    _manage(
        "scale a version",
        "PUT",
        "/models/one/1.11?min_worker=1&synchronous=true",
        200,
        f"{SCALED}, version: 1.11",
    ),
    _manage("list", "GET", "/models", 200, '"modelName": "one"'),
    _manage("describe", "GET", "/models/one", 200, '"modelVersion": "1.11"'),
    _manage(
        "register with workers",
        "POST",
        f"{REGISTER}noop&initial_workers=1&synchronous=true",
        200,
        "registered with 1 initial workers",
    ),
    _manage(
        "first version",
        "POST",
        f"{REGISTER}versioned&initial_workers=1&synchronous=true",
        200,
        "Version: 1.11",
    ),
    _manage(
        "second version",
        "POST",
        "/models?url=ok_v2.mar&model_name=versioned&initial_workers=1&synchronous=true",
        200,
        "Version: 1.2.1",
    ),
    _manage("describe the default version", "GET", "/models/versioned", 200, '"modelVersion": "1.11"'),
    _manage("describe all versions", "GET", "/models/versioned/all", 200, '"modelVersion": "1.2.1"'),
    _manage("describe one version", "GET", "/models/versioned/1.11", 200, '"modelVersion": "1.11"'),
    _infer("predict with a version", "/predictions/versioned/1.11", body=b"data=test", type=FORM),
    _manage(
        "set the default version",
        "PUT",
        "/models/versioned/1.2.1/set-default",
        200,
        'for model \\"versioned\\" to \\"1.2.1\\"',
    ),
    _manage("unregister", "DELETE", "/models/noop", 200, 'Model \\"noop\\" unregistered'),
    _manage(
        "register by a JSON body",
        "POST",
        "/models",
        200,
        "Version: 1.11 registered with 1 initial workers",
        body=b'{"url": "ok.mar", "model_name": "noop", "initial_workers": "1", '
        b'"synchronous": "true", "max_batch_delay": "100"}',
    ),
    _manage(
        "register by nearly JSON",
        "POST",
        "/models",
        200,
        "Version: 1.11 registered with 1 initial workers",
        body=b"{'url':'ok.mar', 'model_name':'single', 'initial_workers':'1', 'synchronous':'true'}",
    ),
    _infer("predict by a form", "/predictions/noop", body=b"data=test", type=FORM),
    _infer("predict octets", "/predictions/noop", body=b"test", type=OCTETS),
    _infer("predict JSON", "/predictions/noop"),
    _infer("invocations by JSON", "/invocations?model_name=noop"),
    _infer("invocations by multipart", "/invocations", **FORM_OF_PARTS),
    _infer("invoke by JSON", "/models/noop/invoke"),
    _infer("invoke by multipart", "/models/noop/invoke", **FORM_OF_PARTS),
    _get("the old predict path", "/noop/predict?data=test", 200, "OK"),
    _infer("a request that is too large", "/predictions/noop", 413, "", body=bytes(1_100_000), type=OCTETS),
    _infer("one that is just small enough", "/predictions/noop", body=bytes(1_000_000), type=OCTETS),
    _manage("model of kinds", "POST", "/models?url=kinds.mar&initial_workers=1&synchronous=true"),
    _infer("JSON is decoded", "/predictions/kinds", holds="", lacks="bytearray"),
    _manage("model of headers", "POST", "/models?url=headers.mar&initial_workers=1&synchronous=true"),
    _infer("a handler sets headers", "/predictions/headers", holds="bytearray", header=("dummy", "1")),
    _infer(
        "a handler sets the content type",
        "/predictions/headers",
        holds="",
        header=("content-type", "text/plain"),
    ),
    _manage(
        "register from a URL",
        "POST",
        "/models?url={downloads}/fetched.mar&model_name=fetched",
        200,
        "registered with 0 initial workers",
    ),
    _manage("unregister it", "DELETE", "/models/fetched", 200, "unregistered"),
    _manage(
        "and again, as its file has gone", "POST", "/models?url={downloads}/fetched.mar&model_name=fetched"
    ),
    _manage("unregister it again", "DELETE", "/models/fetched"),
    _manage("memory at work", "POST", "/models?url=memory_at_work.mar&initial_workers=1&synchronous=true"),
    _infer("a prediction without memory", "/predictions/memory_at_work", 507, "", body=b"data=x"),
    _manage("unregister the model without memory", "DELETE", "/models/memory_at_work"),
    _manage(
        "statuses of a batch",
        "POST",
        "/models?url=batch_status.mar&initial_workers=1&synchronous=true",
        200,
        "registered with 1 initial workers",
    ),
    _infer(
        "a status that the handler sets",
        "/predictions/batch_status",
        507,
        "Invalid response",
        body=b"data=invalid_output",
        type=FORM,
    ),
    _get("root by GET", "/", 405, NOT_ALLOWED),
    _get("an unknown path", "/InvalidUrl", 404, NOT_FOUND),
    Row(
        JAVA,
        "describe an unknown model by OPTIONS",
        "OPTIONS",
        "/predictions/none",
        (404,),
        NO_MODEL,
        api="inference",
    ),
    _get("predictions of no model", "/predictions", 404, NOT_FOUND),
    _get("predictions of an unknown model", "/predictions/none", 404, NO_MODEL),
    _get("predictions of an unknown version", "/predictions/versioned/1.3.1", 404, NO_VERSION),
    _manage("an unknown path of management", "GET", "/InvalidUrl", 404, NOT_FOUND),
    _manage("a method that models do not have", "PUT", "/models", 405, NOT_ALLOWED),
    _manage("a method that a model does not have", "POST", "/models/noop", 405, NOT_ALLOWED),
    _manage("describe an unknown model", "GET", "/models/none", 404, NO_MODEL),
    _manage("describe an unknown version", "GET", "/models/versioned/1.3.1", 404, NO_VERSION),
    _manage("register without a URL", "POST", "/models", 400, "Parameter url is required."),
    _manage(
        "an unknown runtime",
        "POST",
        "/models?url=InvalidUrl&runtime=InvalidRuntime",
        400,
        "Invalid RuntimeType value: InvalidRuntime",
    ),
    _manage(
        "an archive that is not there",
        "POST",
        "/models?url=InvalidUrl",
        404,
        "InvalidUrl",
    ),
    _manage(
        "a version that is registered",
        "POST",
        "/models?url=ok.mar&model_name=one&runtime=python&synchronous=false",
        409,
        "Model version 1.11 is already registered for model one",
    ),
    _manage(
        "a URL that is none",
        "POST",
        "/models?url=http%3A%2F%2Flocalhost%3Aaaaa",
        400,
        "Failed to download",
    ),
    _manage(
        "a server that is not there",
        "POST",
        "/models?url=http%3A%2F%2Flocalhost%3A18888%2Ffake.mar",
        400,
        "http://localhost:18888/fake.mar",
    ),
    _manage(
        "a server without TLS",
        "POST",
        "/models?url=https%3A%2F%2Flocalhost%3A18443%2Ffake.mar",
        400,
        "https://localhost:18443/fake.mar",
    ),
    _manage(
        "a path out of the store",
        "POST",
        "/models?url=..%2Ffake.mar",
        404,
        "Relative path is not allowed in url: ../fake.mar",
    ),
    _manage("scale an unknown model", "PUT", "/models/none", 404, NO_MODEL),
    _manage(
        "scale an unknown version",
        "PUT",
        "/models/versioned/1.3.1?min_worker=2&synchronous=true",
        404,
        NO_VERSION,
    ),
    _manage("unregister an unknown model", "DELETE", "/models/none", 404, NO_MODEL),
    _manage("unregister an unknown version", "DELETE", "/models/versioned/1.3.1", 404, NO_VERSION),
    _manage("register what fails to load", "POST", "/models?url=fails_to_load.mar&initial_workers=0"),
    _manage(
        "scale what fails to load",
        "PUT",
        "/models/fails_to_load?min_worker=1&synchronous=true",
        500,
        "Failed to start workers",
    ),
    _manage("unregister what fails to load", "DELETE", "/models/fails_to_load"),
    _manage(
        "default of an unknown version",
        "PUT",
        "/models/versioned/3.3.3/set-default",
        404,
        "3.3.3 does not exist for model",
    ),
    _manage(
        "unregister the default version",
        "DELETE",
        "/models/versioned/1.2.1",
        403,
        "Cannot remove default version for model versioned",
    ),
    _manage("unregister the other version", "DELETE", "/models/versioned/1.11"),
    _manage(
        "memory at load", "POST", "/models?url=memory_at_load.mar&initial_workers=1&synchronous=true", 507
    ),
)


TABLE = """
Register Model                 | POST   | {ok}
Register Model Mnist           | POST   | models?url={downloads}/digits.mar&model_name=digits
Register it again              | POST   | models?url={downloads}/digits.mar&model_name=digits | 500 409
UnRegister it                  | DELETE | models/digits
Missing url                    | POST   | models | 400
Invalid handler                | POST   | models?url=ok.mar&model_name=bad&handler=invalidHandler
Scale what has no handler      | PUT    | models/bad?min_worker=1&synchronous=true | 500
UnRegister that                | DELETE | models/bad
All versions                   | GET    | models/net/all
One version                    | GET    | models/net/1.11
Valid model                    | GET    | models/net
UnRegister                     | DELETE | models/net
Invalid runtime                | POST   | {ok}&runtime=python4 | 400
List without values            | GET    | models?limit=&next_page_token=
Register again                 | POST   | {ok}
Scale, asynchronous            | PUT    | models/net?min_worker=1 | 202
Scale, synchronous             | PUT    | models/net?min_worker=1&synchronous=true
Scale a version                | PUT    | models/net/1.11?min_worker=1&synchronous=true
Scale an invalid version       | PUT    | models/net/0.0?min_worker=1&synchronous=true | 404
Scale with GPU                 | PUT    | models/net?min_worker=1&number_gpu=1 | 202
Set default                    | PUT    | models/net/1.11/set-default
Set default, invalid version   | PUT    | models/net/0.0/set-default | 404
Set default, invalid model     | PUT    | models/none/1.0/set-default | 404
UnRegister once more           | DELETE | models/net
Handler by a path              | POST   | {ok}&handler=serve/ts/torch_handler/image_classifier.py:handle
UnRegister it then             | DELETE | models/net
Response timeout 0, workers    | POST   | {ok}&initial_workers=3&response_timeout=0&synchronous=true | 200 500
UnRegister the loaded one      | DELETE | models/net | 200 404
Response timeout 0             | POST   | {ok}&response_timeout=0
UnRegister that one            | DELETE | models/net
Batch size                     | POST   | {ok}&batch_size=2
UnRegister the batch           | DELETE | models/net
Batch size that is no number   | POST   | {ok}&batch_size=dd&initial_workers=1&synchronous=true
UnRegister what came of it     | DELETE | models/net
Delay that is no number        | POST   | {ok}&initial_workers=1&max_batch_delay=junk&synchronous=true
UnRegister what came of that   | DELETE | models/net
Register, synchronous          | POST   | {ok}&synchronous=true
UnRegister the synchronous     | DELETE | models/net
Synchronous is no boolean      | POST   | {ok}&synchronous=-1
List with limit                | GET    | models?limit=1
List with negative limit       | GET    | models?limit=-1
List with pagination           | GET    | models?limit=1&next_page_token=1
List with negative pagination  | GET    | models?limit=1&next_page_token=-1
GPU count                      | PUT    | models/net?number_gpu=10 | 202
Negative GPU count             | PUT    | models/net?number_gpu=-1 | 202
Scale up, synchronous          | PUT    | models/net?min_worker=1&max_worker=1&synchronous=true
Scale up, asynchronous         | PUT    | models/net?min_worker=1&max_worker=1&synchronous=false | 202
Timeout -1                     | PUT    | models/net?timeout=-1 | 202
Timeout 0                      | PUT    | models/net?timeout=0 | 202
Empty URL                      | POST   | models?url=&model_name=net | 404
URL of nothing                 | POST   | models?url={downloads}/nothing.mar&model_name=nothing | 400
Invalid model                  | GET    | models/none | 404
Invalid version                | GET    | models/net/0.0 | 404
Page beyond the models         | GET    | models?next_page_token=12
Synchronous is Nan             | PUT    | models/net?min_worker=1&synchronous=Nan | 202
Both are nan                   | PUT    | models/net?min_worker=nan&synchronous=nan | 202
Scale without parameters       | PUT    | models/net | 202
Scale an unknown model         | PUT    | models/none?min_worker=1 | 404
More at least than at most     | PUT    | models/net?min_worker=2&max_worker=1 | 400
One worker                     | PUT    | models/net?min_worker=1 | 202
No worker                      | PUT    | models/net?min_worker=0 | 202
Negative workers               | PUT    | models/net?min_worker=-1 | 500
Negative most workers          | PUT    | models/net?max_worker=-1 | 400
UnRegister, invalid version    | DELETE | models/net/0.0 | 404
UnRegister, synchronous        | DELETE | models/net/?synchronous=true
Register for the next          | POST   | {ok}
UnRegister, nan                | DELETE | models/net/?synchronous=nan
Register for the last          | POST   | {ok}
UnRegister, odd values         | DELETE | models/net/?timeout=true&synchronous=-1
UnRegister an invalid model    | DELETE | models/none | 404
"""


def _management() -> tuple[Row, ...]:
    """Return the rows of `TABLE`: title, method, path, and the statuses where they are not 200 or 202."""
    rows = []
    for line in filter(str.strip, TABLE.splitlines()):
        title, method, path, *statuses = (part.strip() for part in line.split("|"))
        accepted = tuple(int(status) for status in statuses[0].split()) if statuses else (200, 202)
        rows.append(
            Row(
                MANAGEMENT,
                title,
                method,
                "/" + path.replace("{ok}", "models?url=ok.mar&model_name=net"),
                accepted,
            )
        )
    return tuple(rows)


MANAGEMENT_ROWS = _management()
