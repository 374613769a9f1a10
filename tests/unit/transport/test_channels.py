import pytest

from common.errors import ConfigError
from common.ids import Epoch
from common.messages.codec import MAX_SENDER_CHARS
from common.transport.channels import CHANNELS, TOKENS, WhenFull
from common.transport.sockets import MAX_IPC_PATH_BYTES, Identity, check_endpoint, routing_id


def test_every_channel_is_bounded_and_named_once() -> None:
    assert [channel.name for channel in CHANNELS] == ["control", "handoff", "tokens", "admin"]
    for channel in CHANNELS:
        assert 0 < channel.high_water_mark <= 65536, channel.name
        assert 0 < channel.max_message_bytes <= 64 * 2**20, channel.name
        assert channel.when_full in WhenFull
        assert channel.connects != channel.binds


def test_a_full_tokens_queue_costs_streams_and_not_the_gateway() -> None:
    assert TOKENS.when_full is WhenFull.REFUSE


@pytest.mark.parametrize(
    "endpoint",
    [
        "ipc:///run/flowpath/controller.control",
        "ipc://" + "x" * MAX_IPC_PATH_BYTES,
        "tcp://127.0.0.1:0",
        "inproc://" + "x" * 500,
    ],
)
def test_an_endpoint_that_fits_is_taken(endpoint: str) -> None:
    check_endpoint(endpoint)


@pytest.mark.parametrize(
    "path", ["x" * (MAX_IPC_PATH_BYTES + 1), "é" * (MAX_IPC_PATH_BYTES // 2 + 1)]
)
def test_a_socket_path_that_the_kernel_would_cut_is_refused_with_what_to_do(path: str) -> None:
    with pytest.raises(ConfigError, match="FLOWPATH_RUN_DIR"):
        check_endpoint(f"ipc://{path}")


def test_envelopes_of_one_identity_are_numbered_and_carry_its_present_generation() -> None:
    identity = Identity("prefill-0", Epoch(7))
    first = identity.envelope("req-1")
    identity.role_generation = 2
    second = identity.envelope("req-2")
    assert (first.sender, first.epoch, first.role_generation, first.cause) == (
        "prefill-0",
        7,
        0,
        "req-1",
    )
    assert (second.role_generation, second.sequence) == (2, first.sequence + 1)


def test_two_incarnations_of_one_process_never_share_a_routing_id() -> None:
    assert routing_id("decode-0", Epoch(1)) != routing_id("decode-0", Epoch(2))
    # The longest name that an envelope may carry leaves room for the longest epoch.
    longest = "x" * MAX_SENDER_CHARS
    assert routing_id(longest, Epoch(2**53)) != routing_id(longest, Epoch(2**53 - 1))
    assert len(routing_id(longest, Epoch(2**53))) <= 255


def test_a_routing_id_never_begins_with_the_byte_that_zmq_keeps_for_itself() -> None:
    assert routing_id("", Epoch(0))[0] != 0
