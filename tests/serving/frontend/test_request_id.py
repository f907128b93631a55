import uuid

from torchere.serving.frontend.request_id import new_request_id


def test_an_id_is_a_random_uuid_in_its_usual_spelling():
    for _ in range(200):
        found = new_request_id()
        parsed = uuid.UUID(found)
        assert str(parsed) == found
        assert (parsed.version, parsed.variant) == (4, uuid.RFC_4122)


def test_ids_differ():
    assert len({new_request_id() for _ in range(1000)}) == 1000
