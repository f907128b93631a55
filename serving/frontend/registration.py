"""What a client may say when it registers or scales, from any protocol's raw values."""

from __future__ import annotations

from collections.abc import Mapping

from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.controlplane import Registration
from torchere.serving.settings import MAX_NUMBER

UNSET_BATCH_SIZE = -1  # TorchServe's own defaults; sending them says the same as sending nothing
UNSET_BATCH_DELAY = -100


def integer(values: Mapping[str, object], name: str) -> int | None:
    """The whole number called `name`; None when it is absent or empty.

    Raises:
        InvalidRequest: there is a value, and it is no whole number, or one beyond `MAX_NUMBER`. (TorchServe
            took its default instead.)
    """
    value = values.get(name)
    if value is None or value == "":
        return None
    if isinstance(value, float) and value.is_integer():  # some write each number so: 1.0
        value = int(value)
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            number = int(value)
        except ValueError:
            pass
        else:
            if -MAX_NUMBER <= number <= MAX_NUMBER:
                return number
            raise InvalidRequest(f"Parameter {name} must be a whole number of at most {MAX_NUMBER}")
    raise InvalidRequest(f"Parameter {name} must be a whole number, found: {str(value)[:100]!r}")


def text(values: Mapping[str, object], name: str) -> str | None:
    """The text called `name`; None when it is absent or empty.

    Raises:
        InvalidRequest: there is a value, and it is no text.
    """
    value = values.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise InvalidRequest(f"Parameter {name} must be a text, found: {str(value)[:100]!r}")
    return value


def flag(values: Mapping[str, object], name: str, default: bool) -> bool:
    """The truth value called `name`: every text but `true`, in any case, is false.

    Raises:
        InvalidRequest: there is a value, and it is neither that nor a text.
    """
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, (bool, str)):
        raise InvalidRequest(f"Parameter {name} must be true or false, found: {str(value)[:100]!r}")
    return value is True or str(value).lower() == "true"


def registration(values: Mapping[str, object]) -> Registration:
    """Read a wish to register from query parameters or a JSON object.

    Raises:
        InvalidRequest: `url` is missing, or a value has the wrong type.
    """
    if values.get("url") is None:
        raise InvalidRequest("Parameter url is required.")
    url = text(values, "url") or ""
    batch_size = integer(values, "batch_size")
    batch_delay = integer(values, "max_batch_delay")
    return Registration(
        url=url,
        model_name=text(values, "model_name"),
        handler=text(values, "handler"),
        runtime=text(values, "runtime"),
        batch_size=None if batch_size == UNSET_BATCH_SIZE else batch_size,
        max_batch_delay_ms=None if batch_delay == UNSET_BATCH_DELAY else batch_delay,
        initial_executors=integer(values, "initial_workers"),
        response_timeout_s=integer(values, "response_timeout"),
        startup_timeout_s=integer(values, "startup_timeout"),
        synchronous=flag(values, "synchronous", default=True),
    )
