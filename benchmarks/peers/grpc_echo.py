"""The floor under gRPC in Python: a bare grpc.aio server that answers each call with its own bytes.

`python grpc_echo.py PORT`. Runs in the project's own environment.
"""

from __future__ import annotations

import asyncio
import sys

import grpc.aio


async def echo(request: bytes, _context: object) -> bytes:
    """Give back what came."""
    return request


class Echo(grpc.GenericRpcHandler):
    """Answers every method, without (de)serialising."""

    def service(self, handler_call_details: object) -> grpc.RpcMethodHandler[bytes, bytes]:
        """The handler of a call."""
        return grpc.unary_unary_rpc_method_handler(echo)


async def main(port: int) -> None:
    """Serve until the process is ended."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
