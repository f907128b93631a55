import os
import uuid

from torchere.serving.frontend.request_id import new_request_id


def test_an_id_is_a_random_uuid_in_its_usual_spelling():
    for _ in range(200):
        found = new_request_id()
        parsed = uuid.UUID(found)
        assert str(parsed) == found
        assert (parsed.version, parsed.variant) == (4, uuid.RFC_4122)


def test_a_thousand_ids_differ_from_one_another():
    assert len({new_request_id() for _ in range(1000)}) == 1000


def test_a_forked_process_gives_ids_of_its_own():
    new_request_id()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, new_request_id().encode())
        os._exit(0)
    os.close(writing)
    theirs = os.read(reading, 36).decode()
    os.close(reading)
    assert os.waitpid(child, 0) == (child, 0)
    assert uuid.UUID(theirs).version == 4
    assert theirs not in {new_request_id() for _ in range(100)}
