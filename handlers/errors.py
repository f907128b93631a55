"""Exceptions that handlers raise, and errors of loading a handler, of its answers and its metrics."""

from __future__ import annotations


class PredictionException(Exception):
    """Raised by a handler to answer its whole batch with a status and a text of its choice.

    `str(error)` is `"{message} : {error_code}"`, as handlers written for TorchServe expect.

    Args:
        message: the text the client sees.
        error_code: an HTTP status.
    """

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message, error_code)  # both, so that the error survives pickling between processes
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


def bad_request(message: str) -> PredictionException:
    """Return the error for a request that its client has to change: status 400."""
    return PredictionException(message, 400)


class HandlerLoadError(ValueError):
    """The handler that an archive names can't be loaded; a ValueError, as TorchServe's loader raises.

    The text names the file, the cause and the remedy; `__cause__` is the exception of the archive's own code.
    """


class UnsupportedOutput(TypeError):
    """An element of the list that a handler returned can't be encoded as bytes."""

    message = "Unsupported model output data type."  # for the client
    status = 503  # TorchServe's


class MetricsCacheError(Exception):
    """A metric, or a file that declares metrics, is invalid; raised as one of its subclasses."""

    def __str__(self) -> str:
        return " ".join(map(str, self.args))  # the text itself, where KeyError would show its repr


class MetricsCacheTypeError(MetricsCacheError, TypeError):
    """A metric was declared with a name, unit, dimension or type of the wrong kind."""


class MetricsCacheKeyError(MetricsCacheError, KeyError):
    """No metric of that name and type was declared; in a file: a key is missing or unknown."""


class MetricsCacheValueError(MetricsCacheError, ValueError):
    """A metric's unit or value is outside the range of its type."""


class MetricsCachePyYamlError(MetricsCacheError, ValueError):
    """The file that declares metrics is not YAML."""


class MetricsCacheIOError(MetricsCacheError, OSError):
    """The file that declares metrics can't be read."""
