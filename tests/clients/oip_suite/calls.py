"""Small things every test of tritonclient says."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray


def module_of(client: Any) -> ModuleType:
    """The module that a client's inputs and outputs come from."""
    return tritonclient.grpc if ".grpc." in type(client).__module__ else tritonclient.http


def one_input(client: Any, name: str, array: NDArray[Any], datatype: str, **options: bool) -> Any:
    """An input for that client; `binary_data=False` is for HTTP."""
    made = module_of(client).InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, **options)
    return made
