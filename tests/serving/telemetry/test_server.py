"""A whole server in this process: what requests of both protocols leave in metrics, spans and logs."""

from __future__ import annotations

import asyncio
import json
import re
import zipfile
from collections import defaultdict

import grpc
import pytest
import requests
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from torchere.serving import server as server_module
from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.frontend.grpc.protos.inference_pb2 import PredictionResponse, PredictionsRequest
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from torchere.serving.server import Server
from torchere.serving.telemetry.tracing import SpanMaker

HANDLER = """
import json, time
from ts.torch_handler.base_handler import BaseHandler

class Tell(BaseHandler):
    def initialize(self, context):
        self.context = context
        self.initialized = True
    def preprocess(self, data):
        time.sleep(0.002)
        return data
    def inference(self, data):
        time.sleep(0.02)
        return data
    def postprocess(self, data):
        time.sleep(0.004)
        headers = [self.context.get_all_request_header(i) for i in range(len(data))]
        kept = ("traceparent", "tracestate", "Traceparent")
        return [json.dumps({name: of[name] for name in kept if name in of}) for of in headers]
"""
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
METHOD = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"


@pytest.fixture
def spans(monkeypatch):
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(server_module, "open_tracing", lambda: SpanMaker(provider))
    return exporter


@pytest.fixture
def settings(tmp_path):
    model = {"modelName": "tell", "modelVersion": "2.0", "handler": "h.py", "configFile": "c.yaml"}
    with zipfile.ZipFile(tmp_path / "tell.mar", "w") as archive:
        archive.writestr("h.py", HANDLER)
        archive.writestr("c.yaml", "isolation: thread\nbatchSize: 4\nmaxBatchDelay: 30\nminWorkers: 1\n")
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    return ServerSettings(
        model_store=tmp_path,
        load_models=("all",),
        default_executors=1,
        inference_address=Address(),
        management_address=Address(),
        metrics_address=Address(),
        grpc_inference_address=Address(),
        grpc_management_address=None,
        token_auth_enabled=False,
        system_metrics_enabled=False,
        tracing_enabled=True,
        temp_dir=tmp_path,
    )


class Client:
    """Asks a running server, in a thread of its own."""

    def __init__(self, endpoints):
        self.rest = {api: f"http://127.0.0.1:{a.port}" for api, a in endpoints.rest.items()}
        self.grpc = f"127.0.0.1:{endpoints.grpc['inference'].port}"

    def ready(self):
        return requests.get(f"{self.rest['inference']}/readyz", timeout=10).ok

    def predict(self, **headers):
        return requests.post(f"{self.rest['inference']}/predictions/tell", b"x", headers=headers, timeout=30)

    def predict_by_grpc(self, model="tell", metadata=()):
        with grpc.insecure_channel(self.grpc) as channel:
            call = channel.unary_unary(
                METHOD, PredictionsRequest.SerializeToString, PredictionResponse.FromString
            )
            message = PredictionsRequest(model_name=model, input={"data": b"x"})
            return call(message, metadata=metadata, timeout=30).prediction

    def infer(self, model):
        body = {"inputs": [{"name": "x", "shape": [1], "datatype": "INT8", "data": [1]}]}
        return requests.post(f"{self.rest['inference']}/v2/models/{model}/infer", json=body, timeout=30)

    def infer_by_grpc(self, model):
        with grpc.insecure_channel(self.grpc) as channel:
            call = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                ModelInferRequest.SerializeToString,
                ModelInferResponse.FromString,
            )
            return call(ModelInferRequest(model_name=model), timeout=30)

    def samples(self):
        text = requests.get(f"{self.rest['metrics']}/metrics", timeout=10).text
        lines = [line for line in text.splitlines() if line.startswith("torchere_")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def served(settings, use):
    """What `use(client)` returns, called in a thread while a server runs."""

    async def main():
        server = Server(settings)
        client = Client(await server.start())
        try:
            while not await asyncio.to_thread(client.ready):
                await asyncio.sleep(0.05)
            return await asyncio.to_thread(use, client)
        finally:
            await server.stop()

    return asyncio.run(main())


def test_both_protocols_are_measured_traced_and_logged(settings, spans, caplog):
    def use(client):
        told = json.loads(client.predict(Traceparent=PARENT, tracestate="vendor=1").content)
        assert told == {"Traceparent": PARENT, "tracestate": "vendor=1"}  # in the client's spelling
        metadata = (("traceparent", PARENT), ("tracestate", "vendor=1"), ("other", "x"))
        assert json.loads(client.predict_by_grpc(metadata=metadata)) == dict(metadata[:2])
        with pytest.raises(grpc.RpcError):
            client.predict_by_grpc("missing")
        assert client.infer("missing").status_code == 404
        assert client.predict(**{"x-torchere-priority": "high"}).status_code == 400
        with pytest.raises(grpc.RpcError):
            client.predict_by_grpc(metadata=(("x-torchere-priority", "high"),))
        assert client.predict(**{"content-type": "multipart/form-data"}).status_code == 400
        with pytest.raises(grpc.RpcError):
            client.infer_by_grpc("missing")
        return client.samples()

    with caplog.at_level("INFO", "ACCESS_LOG"):
        found = served(settings, use)
    version = 'model="tell",version="2.0",'
    assert found[f'torchere_requests_total{{{version}protocol="rest",code="200",}}'] == 1
    assert found[f'torchere_requests_total{{{version}protocol="grpc",code="OK",}}'] == 1
    assert found[f"torchere_request_duration_seconds_count{{{version}}}"] == 2
    assert found['torchere_requests_rejected_total{model="",version="",reason="not_found",}'] == 3
    assert found['torchere_requests_rejected_total{model="",version="",reason="invalid",}'] == 3

    stages = {
        match[1]: value
        for name, value in found.items()
        if (match := re.match(r'torchere_stage_duration_seconds_sum\{.*stage="(\w+)"', name))
    }
    assert sum(stages.values()) == pytest.approx(found[f"torchere_request_duration_seconds_sum{{{version}}}"])
    assert stages["inference"] >= 0.04  # two alone
    assert stages["batch_wait"] >= 0.055  # and 30 ms for company each
    assert 0.008 <= stages["postprocess"] < stages["inference"]

    by_trace = defaultdict(list)
    for span in spans.get_finished_spans():
        by_trace[f"{span.context.trace_id:032x}"].append(span.name)
    assert by_trace[TRACE].count("inference") == 2
    assert {"POST /predictions/{model}", METHOD.removeprefix("/")} <= {*by_trace[TRACE]}
    assert {name for names in by_trace.values() for name in names} >= {"batch", "load", "queue", "send"}

    lines = [record for record in caplog.records if record.name == "ACCESS_LOG"]
    ours = [vars(record) for record in lines if getattr(record, "model", "") == "tell"]
    assert len(ours) == 2
    for fields in ours:
        assert (fields["trace_id"], fields["version"]) == (TRACE, "2.0")
        assert re.fullmatch(r"[0-9a-f-]{36}", fields["request_id"])


def test_a_client_that_goes_away_and_a_server_at_rest_are_told_apart(settings, spans):
    def use(client):
        with pytest.raises(requests.Timeout):
            requests.post(f"{client.rest['inference']}/predictions/tell", b"x", timeout=0.005)
        while not (found := client.samples()).get(
            'torchere_requests_total{model="tell",version="2.0",protocol="rest",code="499",}'
        ):
            continue
        return found

    found = served(settings, use)
    kinds = [name for name in found if name.startswith("torchere_requests_cancelled_total{")]
    assert sorted(found[name] for name in kinds) == [0, 0, 1]
    assert found['torchere_requests_in_flight{model="tell",version="2.0",}'] == 0
    assert found["torchere_inflight"] == 0
