"""Head and body go out together, and nothing is lost."""

import asyncio
from collections.abc import Sequence
from typing import Any

from torchere.serving.frontend.rest.joined_writes import LARGE_BYTES, JoinedWrites


class Transport:
    """Remembers what was written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def writelines(self, parts: Sequence[bytes]) -> None:
        self.written += parts

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return 16_384, 65_536

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str) -> str:
        return f"extra {name}"


def joined() -> tuple[Transport, Any]:
    transport = Transport()
    return transport, JoinedWrites(transport, asyncio.get_running_loop())  # type: ignore[arg-type]


def test_two_writes_in_a_turn_are_one() -> None:
    async def main() -> None:
        transport, writes = joined()
        writes.write(b"head ")
        writes.write(b"body")
        assert transport.written == [b"head body"]
        await asyncio.sleep(0)
        assert transport.written == [b"head body"]

    asyncio.run(main())


def test_a_large_body_goes_out_with_its_head_and_is_not_copied() -> None:
    async def main() -> None:
        transport, writes = joined()
        body = bytes(LARGE_BYTES + 1)
        writes.write(b"head")
        writes.write(body)
        assert transport.written == [b"head", body]
        assert transport.written[1] is body

    asyncio.run(main())


def test_a_single_write_goes_out_at_the_end_of_its_turn() -> None:
    async def main() -> None:
        transport, writes = joined()
        writes.write(b"one")
        assert transport.written == []
        await asyncio.sleep(0)
        assert transport.written == [b"one"]
        writes.write(b"two")
        await asyncio.sleep(0)
        assert transport.written == [b"one", b"two"]

    asyncio.run(main())


def test_what_is_whole_goes_out_at_once_behind_what_is_held() -> None:
    async def main() -> None:
        transport, writes = joined()
        writes.write(b"go on ")
        writes.write_whole(b"head ", b"body")
        writes.write_whole(b"chunk")
        assert transport.written == [b"go on ", b"head body", b"chunk"]
        await asyncio.sleep(0)
        assert len(transport.written) == 3

    asyncio.run(main())


def test_closing_sends_what_is_held_first() -> None:
    async def main() -> None:
        transport, writes = joined()
        writes.write(b"last words")
        writes.close()
        assert (transport.written, transport.closed) == ([b"last words"], True)
        assert writes.is_closing()

    asyncio.run(main())


def test_everything_else_is_the_transports() -> None:
    async def main() -> None:
        _, writes = joined()
        assert writes.get_extra_info("peername") == "extra peername"

    asyncio.run(main())


def test_nothing_is_written_where_the_client_has_just_left() -> None:
    """uvloop raises on it; uvicorn hears of the end a turn later."""

    async def main() -> None:
        transport, writes = joined()
        writes.write(b"head")
        transport.closed = True
        writes.write(b"body")
        writes.write_whole(b"head", b"body")
        writes.write(b"held")
        await asyncio.sleep(0)
        assert transport.written == []

    asyncio.run(main())
