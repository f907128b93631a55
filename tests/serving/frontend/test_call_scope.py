"""What one call tells telemetry of the predictions in it."""

from torchere.serving.batching.request import Request
from torchere.serving.frontend.call_scope import CallScope
from torchere.serving.telemetry.metrics import Metrics


def test_a_prediction_of_a_call_with_many_counts_as_cancelled_when_nobody_waits_for_it():
    metrics = Metrics()
    meter = metrics.meter("m", "1")
    metrics.show(meter)
    scope = CallScope("grpc", 0.0, lambda: (), str, caller="team", many=True)
    request = Request("id", 0.0)
    scope.begin(metrics, request)
    assert request.caller == "team"
    request.meter = meter

    scope.cancelled(request)
    assert 'protocol="grpc",code="CANCELLED",} 1.0' in metrics.exposition({"torchere_requests_total"})
