"""Answers: whole, in parts, refused, given up."""

import asyncio

import pytest
from h2.settings import SettingCodes

from torchere.serving.frontend.http2.header_blocks import RequestHead


@pytest.mark.parametrize("size", [0, 1, 1000, 65_531, 200_000, 6 * 2**20])
def test_an_answer_of_any_size_comes_whole(run, http2, size):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            stream_id = peer.begin("/echo", end=False)
            await peer.say_all(stream_id, http2.prefixed(bytes(size)), end=True)
            return await peer.answered(stream_id)

    answer = run(main())
    assert answer.messages == [bytes(size)]
    assert answer.headers == {":status": "200", "content-type": "application/grpc"}
    assert answer.trailers == {"grpc-status": "0"}


def test_several_messages_and_a_status_come_in_their_order(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            return await peer.call("/twice", b"a", bytes(100_000))

    answer = run(main())
    assert answer.messages == [b"a", bytes(100_000)] * 2
    assert answer.trailers == {"grpc-status": "5", "grpc-message": "enough: 100%25"}


def test_a_refusal_is_headers_alone_and_stops_the_client(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            return await peer.answered(peer.begin("/refuse", end=False))

    answer = run(main())
    assert (answer.headers["grpc-status"], answer.headers["grpc-message"]) == ("12", "no")
    assert (answer.trailers, answer.data) == ({}, b"")


def test_a_refusal_may_have_a_status_of_http(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            stream_id = peer.begin("/hang", b"m")
            await peer.round_trip()
            (call,) = served.calls
            call.stream.refuse(13, "no", http_status=415)
            call.stream.end(0)
            await peer.round_trip()
            return peer.answers[stream_id]

    answer = run(main())
    assert (answer.headers[":status"], answer.status, answer.data) == ("415", "13", b"")


def test_a_short_answer_does_not_wait_and_one_without_messages_is_whole(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            await peer.call("/echo", b"m")
            (connection,) = served.listener.connections
            return connection.outbound.sends, await peer.call("/many")

    sends, answer = run(main())
    assert sends == 0
    assert answer.headers == {":status": "200", "content-type": "application/grpc"}
    assert (answer.data, answer.trailers) == (b"", {"grpc-status": "0"})


def test_any_number_of_messages_may_come_at_once(run, http2):
    messages = [b"%d" % number for number in range(100)]

    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            return await peer.call("/many", *messages)

    assert run(main()).messages == messages


def test_an_answer_over_the_limit_is_none(run, http2):
    async def main():
        async with http2.listener(limit_bytes=100) as served, http2.peer(served) as peer:
            return await peer.call("/echo", bytes(60), bytes(60))

    answer = run(main())
    assert answer.headers["grpc-status"] == "8"
    assert answer.headers["grpc-message"] == "SERVER: Sent message larger than max (120 vs. 100)"


def test_a_message_over_the_limit_ends_the_call_and_not_the_connection(run, http2):
    async def main():
        async with http2.listener(limit_bytes=100) as served, http2.peer(served) as peer:
            refused = await peer.call("/echo", bytes(101))
            return refused, await peer.call("/echo", bytes(100))

    refused, taken = run(main())
    assert refused.headers["grpc-status"] == "8"
    assert taken.messages == [bytes(100)]


def test_half_a_message_at_the_end_ends_the_call(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            stream_id = peer.begin("/echo", end=False)
            peer.say(stream_id, http2.prefixed(b"message")[:-1], end=True)
            return await peer.answered(stream_id)

    answer = run(main())
    assert (answer.status, answer.headers["grpc-message"]) == (
        "13",
        "the stream ends in the middle of a message",
    )


def test_a_call_that_is_resumed_behind_its_end_is_not_ended_twice(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            peer.begin("/hold", b"message")
            await peer.round_trip()
            (call,) = served.calls
            before = call.ended_by
            call.over.clear()
            call.stream.resume()
            return before, call.over.is_set()

    assert run(main()) == ("half_closed", False)


def test_whoever_makes_much_waits_for_a_slow_client(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served, eats=False) as peer:
            stream_id = peer.begin("/flow")
            answer = peer.answers[stream_id]
            await peer.until(lambda: len(answer.data) == 65_535)
            await peer.round_trip()
            made = served.calls[0].sent
            peer.h2.increment_flow_control_window(2**24)
            peer.h2.increment_flow_control_window(2**24, stream_id)
            peer.flush()
            await peer.answered(stream_id)
            return made, len(answer.messages)

    made, came = run(main())
    assert made <= (65_535 + 65_536) / 10_000 + 2
    assert came == 300


def test_whoever_waits_for_a_client_that_leaves_is_woken(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served, eats=False) as peer:
            stream_id = peer.begin("/flow")
            await peer.until(lambda: len(peer.answers[stream_id].data) == 65_535)
            call = served.calls[0]
            call.task.cancel = lambda: None  # a task that does not mind
            peer.h2.reset_stream(stream_id)
            peer.flush()
            await asyncio.wait_for(call.task, 10)
            return call.ended_by, call.sent

    assert run(main()) == ("gone", 300)


@pytest.mark.parametrize(("path", "data", "status"), [("/refuse", b"", "12"), ("/echo", b"\0\0\0\0\1m", "0")])
def test_what_is_said_after_the_end_is_not_sent(run, http2, path, data, status):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            answer = await peer.call(path, b"m")
            stream = served.calls[0].stream
            stream.send(b"late")
            stream.answer(b"late")
            stream.end(13, "late")
            stream.refuse(13, "late", http_status=500)
            await stream.drained()
            await peer.round_trip()
            return answer

    answer = run(main())
    assert (answer.data, answer.status) == (data, status)


def test_what_comes_behind_an_answer_that_waits_is_passed_over(run, http2):
    async def main():
        settings = {SettingCodes.INITIAL_WINDOW_SIZE: 0}
        async with http2.listener() as served, http2.peer(served, settings=settings) as peer:
            stream_id = peer.begin("/hang", b"one", end=False)
            await peer.round_trip()
            (call,) = served.calls
            call.stream.answer(b"answer")
            peer.say(stream_id, http2.prefixed(b"two"))
            await peer.round_trip()
            return call.messages, call.stream.held_bytes

    assert run(main()) == ([b"one"], 8)


def test_a_call_that_is_refused_early_may_stop_and_did_nothing_wrong(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            answer = peer.answers[peer.begin("/refuse", end=False)]
            await peer.until(lambda: answer.reset is not None)
            return answer

    answer = run(main())
    assert (answer.headers[":status"], answer.status, answer.reset) == ("200", "12", 0)


def test_a_call_without_a_key_keeps_no_fields_that_no_budget_counts(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            metadata = [("grpc-encoding", "x" * 200), ("x-one", "1")]
            peer.begin("/hang", end=False, metadata=metadata, content_type="application/grpc+" + "x" * 200)
            await peer.round_trip()
            stream = served.calls[0].stream
            stream.restrict(1024)
            return stream.head

    assert run(main()) == RequestHead("POST", "/hang", "", "x" * 100, ())
