import pytest

from torchere.serving.config.model_settings import Asked
from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.control import flag, integer, registration, text
from torchere.serving.registry.desired import Wanted


def test_only_the_url_is_required():
    assert registration({"url": "a.mar"}, 2) == Wanted("a.mar", Asked(executors=2))


def test_a_missing_url_is_refused_with_the_known_text():
    with pytest.raises(InvalidRequest, match=r"^Parameter url is required\.$"):
        registration({}, 0)


def test_a_url_that_is_no_text_is_not_called_missing():
    with pytest.raises(InvalidRequest, match="Parameter url must be a text, found: '5'"):
        registration({"url": 5}, 0)


def test_an_empty_url_is_left_to_the_control_plane_which_has_its_own_text():
    assert registration({"url": ""}, 0).url == ""


def test_numbers_come_as_text_from_a_query_and_as_numbers_from_json():
    values = {"url": "a.mar", "batch_size": "3", "initial_workers": 2, "response_timeout": "7"}
    asked = registration(values, 0).asked
    assert (asked.batch_size, asked.executors, asked.response_timeout_s) == (3, 2, 7)


def test_json_may_write_a_whole_number_with_a_point():
    assert integer({"initial_workers": 2.0}, "initial_workers") == 2


def test_the_defaults_of_torchserve_sent_explicitly_count_as_unset():
    asked = registration({"url": "a.mar", "batch_size": "-1", "max_batch_delay": "-100"}, 0).asked
    assert (asked.batch_size, asked.max_batch_delay_ms) == (None, None)


@pytest.mark.parametrize("value", ["abc", "1.5", 1.5, float("inf"), True, [], "9" * 5000])
def test_what_is_no_whole_number_is_refused_by_name(value):
    with pytest.raises(InvalidRequest, match="batch_size must be a whole number"):
        integer({"batch_size": value}, "batch_size")


@pytest.mark.parametrize("value", ["9" * 23, "-" + "9" * 23, 2**31, "9" * 400])
def test_a_number_that_torchserves_type_does_not_hold_is_refused_by_name(value):
    with pytest.raises(InvalidRequest, match="max_batch_delay must be a whole number of at most 2147483647"):
        integer({"max_batch_delay": value}, "max_batch_delay")


def test_the_largest_number_of_torchserve_is_one():
    assert integer({"response_timeout": "2147483647"}, "response_timeout") == 2**31 - 1


def test_a_text_that_is_none_is_refused_by_name():
    with pytest.raises(InvalidRequest, match="handler must be a text"):
        text({"handler": {"a": 1}}, "handler")


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("TRUE", True), (True, True)])
def test_true_in_any_case_is_true(value, expected):
    assert flag({"synchronous": value}, "synchronous", default=False) is expected


@pytest.mark.parametrize("value", ["false", "1", "yes", "", False])
def test_every_other_text_is_false(value):
    assert flag({"synchronous": value}, "synchronous", default=True) is False


@pytest.mark.parametrize("value", [1, 0.0, [], {}])
def test_what_is_neither_a_truth_value_nor_a_text_is_refused_by_name(value):
    with pytest.raises(InvalidRequest, match="synchronous must be true or false, found: "):
        flag({"synchronous": value}, "synchronous", default=True)
