"""Serves an image classifier in fp32 and int8, and asks both for a cat over REST and gRPC.

python -m examples.image_classifier.demo           show it and stop
python -m examples.image_classifier.demo --stay    show it and keep serving until Ctrl+C
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from dataclasses import dataclass

import requests
from PIL import Image

from examples.harness.errors import ExampleFailed, expect
from examples.harness.run import status_of
from examples.harness.server import Ports, Server, ServerFailed, started
from examples.image_classifier.clients import Labels, grpc_client, median_ms, rest_client
from examples.image_classifier.models import DEMO, MODEL, Built, build
from examples.image_classifier.photographs import CAT, photograph

CATS = ("tabby", "tiger cat", "Persian cat", "Siamese cat", "Egyptian cat")  # ImageNet's classes 281 to 285
_LABEL_WIDTH = 24
_METRICS = ("ts_inference_requests_total", "ts_inference_latency_microseconds", "Requests2XX", "HandlerTime")


@dataclass(frozen=True, slots=True)
class Shown:
    """What one version answered."""

    built: Built
    labels: Labels
    rest_ms: float
    grpc_ms: float


def main() -> int:
    """Run the demo; the exit status is 0 when every answer was a cat and the server ended in order."""
    parser = argparse.ArgumentParser(description="Serve an image classifier and ask it for a cat.")
    parser.add_argument("--stay", action="store_true", help="keep serving until Ctrl+C")
    stay = parser.parse_args().stay
    return status_of(lambda: _run(stay), DEMO / "run")


def _run(stay: bool) -> None:
    print("EfficientNet-Lite0 (ImageNet) as fp32 and as int8, on one server\n\nModels")
    built = build()
    models = [f"{MODEL}={one.archive}" for one in built]
    with started(DEMO / "run", DEMO / "store", models, Ports.free()) as server:
        _announce(server)
        server.wait_until_ready(MODEL)
        picture = _cat_as_jpeg()
        shown = [_show(server, one, picture) for one in built]
        _print_labels(shown)
        _print_times(shown)
        _print_metrics(server)
        if stay:
            _stay(server)
        print(f"\nStopped by SIGTERM in {server.stop():.1f} s, exit status 0")


def _show(server: Server, built: Built, picture: bytes) -> Shown:
    """Ask one version over both protocols; both must see a cat, and answer the same."""
    over_rest = rest_client(server, MODEL, built.version)
    with server.grpc() as connection:
        over_grpc = grpc_client(connection, MODEL, built.version)
        labels = over_rest(picture)
        _expect_cat(labels, built)
        other = over_grpc(picture)
        expect(other == labels, f"version {built.version} answers {labels} over REST and {other} over gRPC")
        return Shown(built, labels, median_ms(over_rest, picture), median_ms(over_grpc, picture))


def _expect_cat(labels: Labels, built: Built) -> None:
    first = next(iter(labels), "nothing")
    if not first.startswith(CATS):
        who = f"version {built.version} ({built.precision})"
        raise ExampleFailed(f"{who} sees {first!r} first in {CAT}; expected one of {', '.join(CATS)}")


def _cat_as_jpeg() -> bytes:
    buffer = io.BytesIO()
    with Image.open(photograph(CAT)) as image:
        image.convert("RGB").save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def _announce(server: Server) -> None:
    ports = server.ports
    print(
        f"\nServer, pid {server.process.pid}; token authorisation on, keys in {DEMO.name}/run/key_file.json"
    )
    print(f"  REST      http://127.0.0.1:{ports.inference}/predictions/{MODEL}")
    print(f"  gRPC      127.0.0.1:{ports.grpc_inference}")
    print(f"  metrics   http://127.0.0.1:{ports.metrics}/metrics", flush=True)


def _print_labels(shown: list[Shown]) -> None:
    print(f"\nWhat is in {CAT}? The same answer over REST and gRPC")
    names = [f"{one.built.version} {one.built.precision}" for one in shown]
    print("  " + "".join(f"{name:<{_LABEL_WIDTH + 14}}" for name in names).rstrip())
    for row in zip(*(one.labels.items() for one in shown), strict=True):
        print("  " + "".join(f"{_cut(label):<{_LABEL_WIDTH}}{p:7.1%}{'':7}" for label, p in row).rstrip())


def _cut(label: str) -> str:
    return label if len(label) < _LABEL_WIDTH else label[: _LABEL_WIDTH - 4] + "..."


def _print_times(shown: list[Shown]) -> None:
    print("\nMedian latency, including image decoding")
    print(f"  {'':<12}{'REST':>10}{'gRPC':>12}{'archive':>14}")
    for one in shown:
        name = f"{one.built.version} {one.built.precision}"
        size = one.built.size_bytes / 1e6
        print(f"  {name:<12}{one.rest_ms:>7.1f} ms{one.grpc_ms:>9.1f} ms{size:>11.1f} MB")
    fp32, int8 = shown
    faster, smaller = fp32.rest_ms / int8.rest_ms, fp32.built.size_bytes / int8.built.size_bytes
    print(f"  int8 is {faster:.1f} times as fast over REST, and the archive is {smaller:.1f} times smaller")


def _print_metrics(server: Server) -> None:
    text = requests.get(server.url(server.ports.metrics, "/metrics"), timeout=10).text
    print("\nMetrics of this run")
    for line in text.splitlines():
        if line.startswith(_METRICS):
            labels, _, value = line.rpartition(" ")
            print(f"  {_without_host(labels)} {float(value):.0f}")


def _without_host(series: str) -> str:
    name, _, labels = series.partition("{")
    kept = [one for one in labels.rstrip("}").split(",") if one and not one.lower().startswith("hostname")]
    return f"{name}{{{', '.join(kept)}}}"


def _stay(server: Server) -> None:
    """Serve until Ctrl+C or SIGTERM, or until the server itself ends."""
    port, key = server.ports.inference, server.bearer("inference")["authorization"]
    with contextlib.suppress(KeyboardInterrupt):
        print("\nServing until Ctrl+C. Try it:")
        print(f"  curl -H 'Authorization: {key}' -T PHOTOGRAPH \\")
        print(f"       http://127.0.0.1:{port}/predictions/{MODEL}/2.0", flush=True)
        raise ServerFailed(f"it ended by itself with exit status {server.process.wait()}")


if __name__ == "__main__":
    sys.exit(main())
