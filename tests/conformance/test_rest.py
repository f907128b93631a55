"""Every recorded REST request is answered as TorchServe 0.12.0 answered it, or as deviations.yaml says."""

import pytest
from conformity.recordings import Exchange, rest_names


@pytest.mark.parametrize("case", rest_names())
def test_a_recorded_request_is_answered_as_torchserve_answered_it(
    case: str, rest_exchanges: dict[str, Exchange]
) -> None:
    assert rest_exchanges[case].problems == []
