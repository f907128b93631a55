import pytest

from torchere.serving.frontend import wording
from torchere.serving.frontend.control import Progress, Registered
from torchere.serving.types import ModelKey

KEY = ModelKey("noop", "1.11")


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (
            Registered(KEY, 0, Progress.DONE),
            'Model "noop" Version: 1.11 registered with 0 initial workers. '
            "Use scale workers API to add workers for the model.",
        ),
        (Registered(KEY, 2, Progress.DONE), 'Model "noop" Version: 1.11 registered with 2 initial workers'),
        (Registered(KEY, 2, Progress.STARTED), "Processing worker updates..."),
        (Registered(KEY, 2, Progress.PARTIAL), "Workers scaling in progress..."),
    ],
)
def test_registering_is_told_as_clients_know_it(result, sentence):
    assert wording.registered(result) == sentence


def test_scaling_names_the_version_only_when_one_was_given():
    assert wording.scaled(Progress.DONE, "noop", None, 2) == "Workers scaled to 2 for model: noop"
    assert (
        wording.scaled(Progress.DONE, "noop", "1.0", 2) == "Workers scaled to 2 for model: noop, version: 1.0"
    )
    assert wording.scaled(Progress.STARTED, "noop", None, 2) == "Processing worker updates..."
    assert wording.scaled(Progress.PARTIAL, "noop", None, 2) == "Workers scaling in progress..."


def test_the_other_sentences_name_the_model():
    assert wording.unregistered("noop") == 'Model "noop" unregistered'
    assert wording.default_set(KEY) == 'Default version successfully updated for model "noop" to "1.11"'
