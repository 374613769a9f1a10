"""The bytes of every message stand in golden/messages.json, so that no encoding changes unseen.

A new message, or a change of the protocol that is meant, gets its bytes with
``python tests/unit/messages/write_golden.py``.
"""

import json
from pathlib import Path

import pytest

from common.ids import Epoch
from common.messages.codec import PROTOCOL_VERSION, Envelope
from tests.support.message_builders import all_messages, an_example, codec_of

ENVELOPE = Envelope("prefill-0", Epoch(2**53 - 1), 3, 70000, "req-1")
PAYLOAD = (b"\x01\x00\x00\x00\x02\x00\x00\x00",)
FILE = Path(__file__).parent / "golden" / "messages.json"
GOLDEN = json.loads(FILE.read_text()) if FILE.exists() else {"messages": {}}


def encode(message: type) -> list[str]:
    frames = codec_of(message).encode(ENVELOPE, an_example(message), PAYLOAD)
    return [frame.hex() for frame in frames]


def test_the_golden_file_holds_exactly_the_messages_of_the_catalogue() -> None:
    assert sorted(GOLDEN["messages"]) == sorted(all_messages())


def test_the_golden_file_is_of_this_protocol_version() -> None:
    assert GOLDEN["protocol_version"] == PROTOCOL_VERSION


@pytest.mark.parametrize("name", sorted(all_messages()))
def test_a_message_still_has_its_golden_bytes(name: str) -> None:
    assert encode(all_messages()[name]) == GOLDEN["messages"].get(name), (
        f"the bytes of {name} have changed: a peer of the same protocol version cannot read them"
    )


@pytest.mark.parametrize("name", sorted(all_messages()))
def test_golden_bytes_decode_to_the_message(name: str) -> None:
    message = all_messages()[name]
    received = codec_of(message).decode([bytes.fromhex(f) for f in GOLDEN["messages"][name]])
    assert received.message == an_example(message)
    assert type(received.message) is message
    assert received.envelope == ENVELOPE
    assert received.payload == PAYLOAD
