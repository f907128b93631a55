from __future__ import annotations

import pickle

from torchere.handlers.errors import PredictionException


def test_a_prediction_exception_reads_as_message_and_code() -> None:
    error = PredictionException("no such thing", 513)
    assert (str(error), error.message, error.error_code) == ("no such thing : 513", "no such thing", 513)


def test_its_code_is_500_when_none_is_given() -> None:
    assert PredictionException("x").error_code == 500


def test_it_survives_the_way_between_processes() -> None:
    again = pickle.loads(pickle.dumps(PredictionException("x", 404)))
    assert (again.message, again.error_code) == ("x", 404)
