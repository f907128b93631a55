"""Modules that the operator names are imported once, before the workers."""

from collections.abc import Callable

from servers import RunningServer

HANDLER = """
import os, sys

def handle(data, context):
    return [f"{os.getpid()} {'wsgiref.headers' in sys.modules}"] * len(data or [])
"""
NAMED = "preload_modules=no.such.module, wsgiref.headers\n"


def test_workers_find_what_the_operator_named_and_a_wrong_name_is_told(
    start_server: Callable[..., RunningServer], pack: Callable[..., str]
) -> None:
    archive = pack("asks", {"h.py": HANDLER}, handler="h.py")
    server = start_server("--disable-token-auth", "--enable-model-api", "--models", archive, properties=NAMED)
    first, found = server.call("POST", "/predictions/asks", b"x").body.decode().split()
    assert found == "True"
    assert server.logs("preload_modules: no.such.module can't be imported (ModuleNotFoundError(")

    assert server.register(archive, model_name="later", initial_workers=1, synchronous="true").status == 200
    other, found = server.call("POST", "/predictions/later", b"x").body.decode().split()
    assert (found, other != first) == ("True", True)
