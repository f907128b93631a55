"""What becomes of metrics when the configuration asks for log files, or is no good."""

import re
from typing import Any

LINE = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - "


def test_in_log_mode_metrics_go_to_their_files_and_the_endpoint_is_empty(
    pack_one: Any, start_server: Any, client_of: Any
) -> None:
    pack_one("class_form")
    server = start_server(
        "--disable-token-auth", "--models", "class_form.mar", properties="metrics_mode=log\n"
    )
    server.follow("class_form:1.0 is ready")
    client_of(server).send_json("class_form", {"value": 1})
    server.follow("DiskUtilization.Percent:")
    server.stop()
    written = (server.folder / "logs" / "ts_metrics.log").read_text()
    for line in (
        r"WorkerLoadTime\.Milliseconds:\d+\.0\|#WorkerName:W-9000-class_form_1\.0,Level:Host\|#",
        r"ts_inference_requests_total\.Count:1\.0\|#model_name:class_form,model_version:default\|#",
        r"Requests2XX\.Count:1\.0\|#Level:Host\|#",
        r"CPUUtilization\.Percent:\S+\|#Level:Host\|#",
    ):
        assert re.search(rf"^{LINE}{line}hostname:[^,]+,timestamp:\d{{10}}$", written, re.MULTILINE), line
    model = (server.folder / "logs" / "model_metrics.log").read_text()
    labels = r"#ModelName:class_form,Level:Model\|#"
    tail = r"hostname:[^,]+,requestID:[0-9a-f-]{36},timestamp:\d{10}"
    assert re.fullmatch(rf"{LINE}PredictionTime\.ms:[\d.]+\|{labels}{tail}\n", model)


def test_a_bad_metrics_file_costs_its_metrics_and_not_the_service(start_server: Any, client_of: Any) -> None:
    server = start_server("--disable-token-auth", properties="metrics_config=none.yaml\n")
    assert (
        "Failed to load metrics configuration: MetricsCacheIOError: none.yaml: No such file" in server.log()
    )
    assert server.call("GET", "/ping").status == 200
    text = server.call("GET", "/metrics", api="metrics").body.decode()
    assert "torchere_ready 1.0" in text
    assert "Requests2XX" not in text
    server.stop()


def test_without_system_metrics_the_host_is_not_sampled(start_server: Any, client_of: Any) -> None:
    server = start_server("--disable-token-auth", properties="disable_system_metrics=true\n")
    client = client_of(server)
    assert client.exposed("# TYPE MemoryUsed") == ["# TYPE MemoryUsed gauge"]
    assert client.exposed("MemoryUsed{") == []
    server.stop()
