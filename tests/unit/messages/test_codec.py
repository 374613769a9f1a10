from dataclasses import dataclass
from functools import cache
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import RemoteProtocolError
from common.ids import Epoch, TransferId
from common.messages import codec as codec_module
from common.messages.codec import (
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_SENDER_CHARS,
    Codec,
    Envelope,
)
from common.messages.control import ControllerToWorker, Fenced, Goodbye, WorkerToController
from common.messages.handoff import Commit, PrefillToDecode, RenewLeases
from tests.support.message_builders import a_message, all_messages, an_example, codec_of

ENVELOPE = Envelope("prefill-0", Epoch(5), 1, 2, "req-1")
GOODBYE = {"reason": "bye"}
ENDLESS_NUMBER = 10**30
PAYLOADS = st.lists(st.binary(max_size=20), max_size=MAX_FRAMES - 1)


@cache
def message_of(name: str) -> st.SearchStrategy[Any]:  # Any: one of all the messages
    return a_message(all_messages()[name])


def header(**changed: Any) -> bytes:  # Any: fields of the wrong type are the point
    fields: dict[str, Any] = {
        "version": 1,
        "sender": "prefill-0",
        "epoch": 5,
        "generation": 0,
        "sequence": 1,
        "cause": "req-1",
        "tag": "Goodbye",
        "body": GOODBYE,
    }
    return bytes(msgpack.packb(list({**fields, **changed}.values())))


def refusal_of(*frames: bytes, union: Any = WorkerToController) -> str:
    with pytest.raises(RemoteProtocolError) as refused:
        Codec(union).decode(list(frames))
    assert len(str(refused.value)) < 600, "a peer's text must not flood the log"
    return str(refused.value)


# ---- what is right comes back --------------------------------------------------------------------


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
@pytest.mark.parametrize("name", sorted(all_messages()))
def test_a_message_comes_back_as_it_was_sent(name: str, data: st.DataObject) -> None:
    message = data.draw(message_of(name))
    payload = tuple(data.draw(PAYLOADS))
    codec = codec_of(type(message))
    received = codec.decode(codec.encode(ENVELOPE, message, payload))
    assert (received.message, received.payload, received.envelope) == (message, payload, ENVELOPE)
    assert type(received.message) is type(message)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=MAX_SENDER_CHARS),
    st.integers(0, 2**53),
    st.integers(0, 2**53),
    st.integers(0, 2**53),
    st.text(st.characters(exclude_categories=["Cs"])),
)
def test_an_envelope_comes_back_as_it_was_sent(
    sender: str, epoch: int, generation: int, sequence: int, cause: str
) -> None:
    envelope = Envelope(sender, Epoch(epoch), generation, sequence, cause)
    codec: Codec[Any] = Codec(WorkerToController)
    assert codec.decode(codec.encode(envelope, Goodbye(reason=""))).envelope == envelope


def test_encoding_a_message_of_another_conversation_is_a_bug_of_ours() -> None:
    codec: Codec[Any] = Codec(ControllerToWorker)
    with pytest.raises(KeyError, match="Goodbye"):
        codec.encode(ENVELOPE, Goodbye(reason="bye"))


def test_a_codec_of_one_class_knows_that_class() -> None:
    assert Codec(Goodbye).tags == ("Goodbye",)


# ---- what is wrong is refused by name ------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 2, True, 1.0, "1", None, "9" * 60000])
def test_another_version_is_refused_with_both_values(version: object) -> None:
    text = refusal_of(header(version=version))
    assert repr(version)[:30] in text
    assert "ours is 1" in text
    assert "prefill-0" in text


@pytest.mark.parametrize("sender", [None, 7, b"prefill-0", "", "x" * (MAX_SENDER_CHARS + 1)])
def test_a_sender_that_is_no_name_is_refused(sender: object) -> None:
    assert "sender" in refusal_of(header(sender=sender))


@pytest.mark.parametrize("field", ["epoch", "generation", "sequence"])
@pytest.mark.parametrize("value", [True, False, -1, 2**53 + 1, 2**64 - 1, 1.0, "1", None])
def test_a_number_of_the_envelope_that_is_no_count_is_refused_by_name(
    field: str, value: object
) -> None:
    text = refusal_of(header(**{field: value}))
    assert field in text
    assert repr(value) in text


def test_a_cause_that_is_no_text_is_refused() -> None:
    assert "cause" in refusal_of(header(cause=1))


@pytest.mark.parametrize("tag", ["Godbye", "", 1, None, ("Goodbye",), "Fenced", "x" * 60000])
def test_an_unknown_tag_is_refused_by_name(tag: object) -> None:
    text = refusal_of(header(tag=tag))
    assert "unknown message" in text
    assert repr(tag)[:30] in text


@pytest.mark.parametrize("body", [None, 1, "reason", ["reason", "bye"], b"", True])
def test_a_body_that_is_no_map_is_refused_by_name(body: object) -> None:
    assert "body of Goodbye from 'prefill-0' is not a map" in refusal_of(header(body=body))


def test_an_unknown_field_is_refused_by_name() -> None:
    text = refusal_of(header(body={"reason": "bye", "reasons": 1}))
    assert "Goodbye" in text
    assert "reasons" in text


def test_an_unknown_field_deep_inside_is_refused_by_its_path() -> None:
    message = msgpack.unpackb(
        codec_of(all_messages()["control.Heartbeat"]).encode(
            ENVELOPE, an_example(all_messages()["control.Heartbeat"])
        )[0]
    )
    message[7]["kv"]["extra"] = 1
    assert "Heartbeat from 'prefill-0': kv.extra" in refusal_of(msgpack.packb(message))


@pytest.mark.parametrize("key", [1, None, ("reason",), b"reason"])
def test_a_field_whose_name_is_no_text_is_refused(key: object) -> None:
    assert "Goodbye" in refusal_of(header(body={"reason": "bye", key: 1}))


def test_a_missing_field_is_refused_by_name() -> None:
    assert "Goodbye from 'prefill-0': reason" in refusal_of(header(body={}))


def test_a_field_named_twice_is_refused() -> None:
    twice = b"\x82" + msgpack.packb("reason") + msgpack.packb("bye")
    twice += msgpack.packb("reason") + msgpack.packb("no")
    frame = header(body={})
    assert frame.endswith(b"\x80")
    assert "twice" in refusal_of(frame[:-1] + twice)


@dataclass(frozen=True)
class Wrong:
    message: str
    path: tuple[str | int, ...]
    value: object
    told: str = ""
    """How the refusal names the place, where that is not the path."""

    def __str__(self) -> str:
        return f"{self.message}:{'.'.join(map(str, self.path))}={self.value!r:.20}"


WRONG_FIELDS = [
    Wrong("control.HeartbeatAnswered", ("sequence",), True),
    Wrong("control.HeartbeatAnswered", ("sequence",), -1),
    Wrong("control.HeartbeatAnswered", ("sequence",), 2**53 + 1),
    Wrong("control.HeartbeatAnswered", ("sequence",), "7"),
    Wrong("control.HeartbeatAnswered", ("sequence",), 7.0),
    Wrong("control.Heartbeat", ("kv", "free"), False),
    Wrong("control.Heartbeat", ("kv",), None),
    Wrong("control.Heartbeat", ("load", "num_steps"), -5),
    Wrong("control.Heartbeat", ("is_draining",), 1),
    Wrong("control.Heartbeat", ("is_draining",), "yes"),
    Wrong("control.Fenced", ("epoch",), True),
    Wrong("control.Fenced", ("epoch",), -1),
    Wrong("control.Fenced", ("epoch",), "5"),
    Wrong("control.PeerJoined", ("peer", "epoch"), True),
    Wrong("control.PeerJoined", ("peer", "role"), "boss"),
    Wrong("control.PeerJoined", ("peer", "handoff_endpoint"), "http://example.com"),
    Wrong("control.PeerJoined", ("peer", "layout_fingerprint"), "0123456789ABCDEF"),
    Wrong("control.PeerJoined", ("peer", "layout_fingerprint"), "0123456789abcdef\n"),
    Wrong("control.PeerJoined", ("peer", "transports"), ("x",) * 17),
    Wrong("control.GatewayAccepted", ("heartbeat_seconds",), "1"),
    Wrong("control.GatewayAccepted", ("heartbeat_seconds",), float("nan")),
    Wrong("control.GatewayAccepted", ("heartbeat_seconds",), float("inf")),
    Wrong("control.GatewayAccepted", ("heartbeat_seconds",), -0.1),
    Wrong("control.GatewayAccepted", ("heartbeat_seconds",), True),
    Wrong("control.Goodbye", ("reason",), "x" * 4097),
    Wrong("control.Goodbye", ("reason",), b"bytes"),
    Wrong("control.RequestFailed", ("code",), "no_such_code"),
    Wrong("control.SubmitRequest", ("num_prompt_tokens",), 0),
    Wrong("control.SubmitRequest", ("num_prompt_tokens",), True),
    Wrong("control.SubmitRequest", ("params", "top_p"), 0.0),
    Wrong("control.Cancel", ("choice",), 128),
    Wrong("control.Cancel", ("choice",), True),
    Wrong("handoff.Commit", ("first_tokens",), None),
    Wrong("handoff.Commit", ("prefill_done_at",), float("inf")),
    Wrong("handoff.Commit", ("num_cached_tokens",), True),
    Wrong("handoff.PairAccepted", ("pool", "kind"), "vram", "pool"),
    Wrong("handoff.PairAccepted", ("pool", "nonce"), b"short", "pool.memfd.nonce"),
    Wrong("handoff.Abort", ("reason",), "tired"),
    Wrong("tokens.TokensGenerated", ("deltas",), 3),
    Wrong("admin.StatusReport", ("workers",), {}),
    Wrong("admin.StatusReport", ("is_ready",), "no"),
]


@pytest.mark.parametrize("wrong", WRONG_FIELDS, ids=str)
def test_a_field_of_the_wrong_type_or_out_of_bounds_is_refused_by_name(wrong: Wrong) -> None:
    message = all_messages()[wrong.message]
    codec = codec_of(message)
    parts = msgpack.unpackb(codec.encode(ENVELOPE, an_example(message))[0], strict_map_key=False)
    place = parts[7]
    for name in wrong.path[:-1]:
        place = place[name]
    assert wrong.path[-1] in place, "the case names a field that exists"
    place[wrong.path[-1]] = wrong.value
    with pytest.raises(RemoteProtocolError) as refused:
        codec.decode([msgpack.packb(parts)])
    path = wrong.told or ".".join(map(str, wrong.path))
    assert f"{message.__name__} from 'prefill-0': {path}" in str(refused.value)


def test_a_prefix_is_committed_without_a_first_token() -> None:
    commit = Commit(
        transfer_id=TransferId("tr-1"),
        num_tokens=64,
        num_cached_tokens=0,
        first_tokens=(),
        prefill_done_at=0.0,
    )
    codec = codec_of(Commit)
    assert codec.decode(codec.encode(ENVELOPE, commit)).message == commit


def test_a_number_that_no_field_can_hold_is_our_bug_when_sent_and_never_leaves() -> None:
    with pytest.raises(ValueError, match="epoch"):
        Fenced(epoch=Epoch(ENDLESS_NUMBER), message="")


# ---- frames --------------------------------------------------------------------------------------


def test_no_frame_at_all_is_refused() -> None:
    assert "0 frames" in refusal_of()


def test_too_many_frames_are_refused() -> None:
    assert "5 frames; 1 to 4" in refusal_of(header(), *[b""] * MAX_FRAMES)


def test_an_oversized_header_is_refused_before_it_is_parsed() -> None:
    assert "header of 8388609 bytes" in refusal_of(b"\xc1" * (MAX_HEADER_BYTES + 1))


def test_an_oversized_payload_is_refused_over_all_its_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec_module, "MAX_PAYLOAD_BYTES", 10)
    codec: Codec[Any] = Codec(WorkerToController)
    assert codec.decode([header(), b"x" * 5, b"x" * 5]).payload == (b"x" * 5, b"x" * 5)
    assert "payload over 10 bytes" in refusal_of(header(), b"x" * 5, b"x" * 6)


def test_every_truncation_of_a_header_is_refused() -> None:
    whole = header()
    for length in range(len(whole)):
        assert "header" in refusal_of(whole[:length])


def test_bytes_after_the_header_are_refused() -> None:
    assert "header is not MessagePack" in refusal_of(header() + b"\x00")


@pytest.mark.parametrize("frame", [b"\x90", b"\x80", b"\xc0", msgpack.packb([1] * 7), b"\x07"])
def test_a_header_of_another_shape_is_refused(frame: bytes) -> None:
    assert "header is not an array of 8" in refusal_of(frame)


@pytest.mark.parametrize("nest", [b"\x91", b"\x81\xa1a", b"\x81"], ids=["array", "map", "key"])
@pytest.mark.parametrize("depth", [400, 100_000])
def test_deep_nesting_is_refused(nest: bytes, depth: int) -> None:
    frame = header(body={})[:-1] + nest * depth + b"\xc0"
    refusal_of(frame)


@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(b"\xdd\xff\xff\xff\xff", id="array"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="map"),
        pytest.param(b"\xdb\xff\xff\xff\xff", id="text"),
        pytest.param(b"\xc9\xff\xff\xff\xff\x01", id="extension"),
    ],
)
def test_a_claim_of_more_elements_than_allowed_is_refused_without_the_memory(claim: bytes) -> None:
    assert "header is not MessagePack" in refusal_of(header(body={})[:-1] + claim)


def test_an_extension_type_is_refused() -> None:
    timestamp = b"\xd6\xff\x00\x00\x00\x01"
    frame = header(body={})[:-1] + b"\x81\xa6reason" + timestamp
    assert "max_ext_len" in refusal_of(frame)


def test_text_that_is_no_utf8_is_refused() -> None:
    assert "header is not MessagePack" in refusal_of(header().replace(b"bye", b"\xff\xfe\xfd"))


def test_a_list_longer_than_its_bound_is_refused() -> None:
    ids = tuple(f"tr-{n}" for n in range(65537))
    frame = header(tag="RenewLeases", body={"transfer_ids": ids})
    assert "RenewLeases from 'prefill-0': transfer_ids" in refusal_of(frame, union=PrefillToDecode)
    with pytest.raises(ValueError, match="transfer_ids"):
        RenewLeases(transfer_ids=ids)  # type: ignore[arg-type]  # plain texts in place of ids
