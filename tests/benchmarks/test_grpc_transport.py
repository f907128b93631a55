"""What the comparison of gRPC transports is made of: the link to its worker."""

import asyncio

import pytest
from transport.link import BATCH, ITEM, Link


class Written(asyncio.Transport):
    """A transport that keeps each message."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def writelines(self, parts):
        self.messages.append(b"".join(parts))


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_requests_of_a_turn_go_in_one_message_and_answers_come_back_in_any_pieces(step):
    async def main():
        link, transport, found = Link(), Written(), []
        link.connection_made(transport)
        for body in (b"first", b"second"):
            link.ask(3, body, lambda status, answer: found.append((status, bytes(answer))))
        await asyncio.sleep(0)
        answers = b"".join(ITEM.pack(number, 0, 1) + b"%d" % number for number in (2, 1))
        message = BATCH.pack(len(answers), 2) + answers
        for at in range(0, len(message), step):
            link.data_received(message[at : at + step])
        return transport.messages, found

    messages, found = asyncio.run(main())
    asked = ITEM.pack(1, 3, 5) + b"first" + ITEM.pack(2, 3, 6) + b"second"
    assert messages == [BATCH.pack(len(asked), 2) + asked]
    assert found == [(0, b"2"), (0, b"1")]
