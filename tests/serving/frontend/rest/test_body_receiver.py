"""While a large body comes in, its connection's own protocol hears of all else; behind it, it is back."""

from unittest.mock import Mock, call

from torchere.serving.frontend.rest.body import WholeBody
from torchere.serving.frontend.rest.body_receiver import BodyReceiver


def test_what_happens_meanwhile_is_told_to_the_protocol_it_stands_in_for():
    transport = Mock()
    http = transport.get_protocol()
    receiver = BodyReceiver(transport, WholeBody(10), Mock(), Mock())
    lost = ConnectionResetError()
    receiver.pause_writing()
    receiver.resume_writing()
    assert receiver.eof_received() is http.eof_received.return_value
    receiver.connection_lost(lost)
    told = [call.pause_writing(), call.resume_writing(), call.eof_received(), call.connection_lost(lost)]
    assert http.mock_calls == told
    assert len(receiver.get_buffer(-1)) == 0  # the body is let go


def test_the_connection_is_given_back_before_anything_else_when_the_body_is_whole():
    transport, heard = Mock(), Mock()
    http = transport.get_protocol()
    receiver = BodyReceiver(transport, WholeBody(10), heard, transport.then)
    receiver.buffer_updated(9)
    assert heard.call_count == 1
    transport.reset_mock()
    receiver.buffer_updated(1)
    assert heard.call_count == 1
    given_back = [call.pause_reading(), call.set_protocol(http), call.resume_reading(), call.then()]
    assert transport.mock_calls == given_back
    assert len(receiver.get_buffer(-1)) == 0
