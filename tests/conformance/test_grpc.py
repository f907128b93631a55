"""Every recorded gRPC call ends as it did with TorchServe 0.12.0, or as deviations.yaml says."""

import pytest
from conformity.recordings import Exchange, rpc_names


@pytest.mark.parametrize("case", rpc_names())
def test_a_recorded_call_ends_as_it_did_with_torchserve(
    case: str, grpc_exchanges: dict[str, Exchange]
) -> None:
    assert grpc_exchanges[case].problems == []
