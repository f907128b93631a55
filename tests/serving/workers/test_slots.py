"""Slots of shared memory: alone, and between a server and real workers."""

import asyncio
import gc
import mmap
import os
import subprocess
import sys
from typing import Any

import pytest
from pools import pool_in_service

from torchere.serving.types import InferRequest, InferResponse, Parameter
from torchere.serving.workers import lanes, messages
from torchere.serving.workers.executor import BatchReport
from torchere.serving.workers.frames import HEADER
from torchere.serving.workers.slots import BYTES, SLOT_BYTES, SLOTS, Slots

LARGE = 100_000  # bytes


def memory() -> mmap.mmap:
    return mmap.mmap(-1, BYTES)


def used(memory: mmap.mmap, direction: int = 0) -> list[int]:
    flags = memory[direction * SLOTS : (direction + 1) * SLOTS]
    return [slot for slot, flag in enumerate(flags) if flag]


def test_values_lie_in_a_slot_one_behind_the_other() -> None:
    shared = memory()
    slot = Slots(shared, 0, 0).put([b"ab", bytearray(b"c"), memoryview(b"defg")[1:]], 6)
    assert bytes(Slots(shared, 0, 0).take(slot, 6)) == b"abcefg"


def test_a_slot_is_free_when_the_last_view_of_it_is_gone() -> None:
    shared = memory()
    slots = Slots(shared, 0, 1)
    assert [slots.put([b"x"], 1), slots.put([b"y"], 1)] == [0, 1]
    view = slots.take(0, 1)
    part = view[:1]
    del view
    assert used(shared, 1) == [0, 1]
    assert slots.put([b"z"], 1) == 2
    del part
    assert used(shared, 1) == [1, 2]
    assert slots.put([b"z"], 1) == 0
    assert used(shared, 0) == []  # of the other direction


def test_values_without_a_free_slot_or_too_large_for_one_are_left_to_the_socket() -> None:
    slots = Slots(memory(), 0, 0)
    assert slots.put([bytes(SLOT_BYTES + 1)], SLOT_BYTES + 1) == -1
    assert [slots.put([bytes(SLOT_BYTES)], SLOT_BYTES) for _ in range(SLOTS + 1)] == [*range(SLOTS), -1]


@pytest.mark.parametrize(("slot", "size"), [(SLOTS, 1), (-2, 1), (0, SLOT_BYTES + 1)])
def test_a_worker_that_names_bytes_outside_of_a_slot_is_refused(slot: int, size: int) -> None:
    with pytest.raises(ValueError, match="expected one of 8 with at most"):
        Slots(memory(), 0, 0).take(slot, size)


def test_a_slot_that_is_reported_twice_is_free_after_its_last_view() -> None:
    shared = memory()
    slots = Slots(shared, 0, 0)
    slots.put([b"x"], 1)
    first, second = slots.take(0, 1), slots.take(0, 1)
    del first
    assert used(shared) == [0]
    del second
    assert used(shared) == []


FORKS = """
import mmap, os
from torchere.serving.workers.slots import BYTES, Slots
shared = mmap.mmap(-1, BYTES)
slots = Slots(shared, 0, 0)
slots.put([b"x"], 1)
view = slots.take(0, 1)
if (child := os.fork()) == 0:
    del view
    os._exit(0)
os.waitpid(child, 0)
print(shared[0], slots.put([b"y"], 1), bytes(view))
del view
print(shared[0], end=" ")
another = slots.take(1, 1)
del another
print(shared[1])
"""


def test_a_slot_with_views_at_a_fork_is_not_used_again() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.splitlines() == ["1 1 b'x'", "1 0"]


TAKES_AT_A_FORK = """
import mmap, os
views = []
os.register_at_fork(before=lambda: views.append(slots.take(0, 1)))  # earlier hooks run later
from torchere.serving.workers.slots import BYTES, Slots
shared = mmap.mmap(-1, BYTES)
slots = Slots(shared, 0, 0)
slots.put([b"x"], 1)
if (child := os.fork()) == 0:
    views.clear()
    os._exit(0)
os.waitpid(child, 0)
print(shared[0], bytes(views[0]))
views.clear()
print(shared[0])
"""


def test_a_slot_that_is_taken_while_another_thread_forks_is_free_after_the_parents_last_view() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TAKES_AT_A_FORK], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.splitlines() == ["1 b'x'", "0"]


LIMITED = """
import os, resource
from torchere.serving.workers import lanes
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
descriptor = lanes.create(1)
page = lanes.LanePage(descriptor, 1)
page.prepare(0, 3)
print(page.threads, page.to_worker.put([b"x"], 1), page.to_server.put([b"x"], 1))
"""


def test_where_files_must_be_small_there_are_no_slots() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.split() == ["3", "-1", "-1"]


def test_a_view_keeps_the_memory_of_a_page_that_is_closed() -> None:
    descriptor = lanes.create(1)
    server, worker = lanes.LanePage(descriptor, 1), lanes.LanePage(descriptor, 1)
    os.close(descriptor)
    slot = worker.to_server.put([b"answer"], 6)
    view = server.to_server.take(slot, 6)
    server.close()
    worker.close()
    assert bytes(view) == b"answer"
    del view


def test_large_values_of_a_message_are_in_its_slot() -> None:
    shared = memory()
    request = InferRequest("id", (Parameter("a", b"x"), Parameter("b", b"y" * LARGE)))
    (frame,) = messages.encode_run(7, 3, [request], Slots(shared, 0, 0))
    run = messages.data_to_worker.decode(frame[HEADER.size :])
    assert (run.slot, run.large) == (0, ((0, 1, LARGE),))
    (frame,) = messages.encode_report(7, BatchReport([InferResponse(b"z" * LARGE)]), "", Slots(shared, 0, 1))
    done = messages.data_from_worker.decode(frame[HEADER.size :])
    assert isinstance(done, messages.Done)
    assert (done.slot, done.large) == (0, ((0, LARGE),))


def test_a_report_that_cannot_be_sent_as_it_is_takes_one_slot() -> None:
    shared = memory()
    answers = [InferResponse(b"z" * LARGE), InferResponse(b"", (("name", "\ud800"),))]
    messages.encode_report(7, BatchReport(answers), "", Slots(shared, 0, 1))
    assert used(shared, 1) == []


KEEPER = """
    import hashlib
    import torch
    kept = []

    class Handler:
        def initialize(self, context): pass
        def handle(self, data, context):
            body = data[0]["body"]
            kept.append(torch.frombuffer(body, dtype=torch.uint8))
            found = [hashlib.sha256(each.numpy()).hexdigest() for each in kept]
            return [" ".join(found).encode().ljust(100_000)]
"""
SPOILER = """
    class Handler:
        def initialize(self, context): pass
        def handle(self, data, context):
            body = memoryview(data[0]["body"])
            assert not body.readonly
            body[:] = bytes(len(body))
            return [bytes(body)]
"""


@pytest.mark.parametrize("shares_weights", [True, False])
def test_inputs_and_answers_that_are_kept_stay_as_they_are(
    shares_weights: bool, make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    import hashlib

    async def main() -> None:
        async with pool_in_service(make_spec(KEEPER, shares_weights=shares_weights), 1) as pool:
            sent, answers = [], []
            for number in range(2 * SLOTS):
                sink = make_sink()
                text = chr(97 + number) * LARGE
                sent.append(hashlib.sha256(text.encode()).hexdigest())
                sink.submit(pool, [make_request(text)])
                answers.append((await sink.outcome()).body)
            for number, answer in enumerate(answers):
                assert bytes(answer).decode().split() == sent[: number + 1]

    asyncio.run(main())


def test_a_handler_that_changes_its_inputs_changes_its_own_only(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(SPOILER), 1) as pool:
            request, sink = make_request("a" * LARGE), make_sink()
            sink.submit(pool, [request])
            assert bytes((await sink.outcome()).body) == bytes(LARGE)
            assert bytes(request.parameters[0].value) == b"a" * LARGE

    asyncio.run(main())


def test_slots_are_free_after_requests_and_their_answers(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(SPOILER), 1) as pool:
            page = pool._workers[0]._process._launched.page
            for _ in range(3 * SLOTS):
                sink = make_sink()
                sink.submit(pool, [make_request("a" * LARGE)])
                assert len((await sink.outcome()).body) == LARGE
                del sink
            gc.collect()
            assert page.to_worker.put([b"x"], 1) == 0
            assert page.to_server.put([b"x"], 1) == 0

    asyncio.run(main())
