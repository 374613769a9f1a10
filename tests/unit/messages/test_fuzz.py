import random
from collections import Counter
from typing import Any

import msgpack

from common.errors import RemoteProtocolError
from common.ids import Epoch
from common.messages.codec import Codec, Envelope
from tests.support.message_builders import DIRECTIONS, an_example, members

NUM_FRAMES = 20_000
ENVELOPE = Envelope("prefill-0", Epoch(5), 1, 2, "req-1")
# Any: values of every type
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**64 - 1,
    1e308,
    float("nan"),
    "",
    "x" * 300,
    b"\xff",
    [],
    {},
    {1: 2},
)


def mutated(rng: random.Random, frame: bytes) -> bytes:
    """Change a frame the way a broken or hostile peer would."""
    data = bytearray(frame)
    match rng.randrange(6):
        case 0:
            data[rng.randrange(len(data))] = rng.randrange(256)
        case 1:
            for _ in range(rng.randrange(1, 8)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 2:
            del data[rng.randrange(len(data)) :]
        case 3:
            place = rng.randrange(len(data))
            data[place:place] = rng.randbytes(rng.randrange(1, 5))
        case 4:
            data = bytearray(rng.randbytes(rng.randrange(64)))
        case _:
            parts = msgpack.unpackb(frame, strict_map_key=False)
            body = parts[7]
            target = body if isinstance(body, dict) and body and rng.random() < 0.8 else None
            if target is None:
                parts[rng.randrange(8)] = rng.choice(ODD_VALUES)
            else:
                target[rng.choice(list(target))] = rng.choice(ODD_VALUES)
            data = bytearray(msgpack.packb(parts))
    return bytes(data)


def codec_for(union: Any) -> Codec[Any]:  # Any: every direction in turn
    return Codec(union)


def test_no_bytes_raise_anything_but_a_protocol_error() -> None:
    rng = random.Random(20260)
    codecs = [
        (codec, [codec.encode(ENVELOPE, an_example(message))[0] for message in members(union)])
        for directions in DIRECTIONS.values()
        for union in directions.values()
        for codec in [codec_for(union)]
    ]
    outcomes: Counter[str] = Counter()
    for _ in range(NUM_FRAMES):
        codec, frames = rng.choice(codecs)
        frame = mutated(rng, rng.choice(frames))
        try:
            codec.decode([frame])
        except RemoteProtocolError as error:
            outcomes["refused" if len(str(error)) < 600 else "flooded the log"] += 1
        else:
            outcomes["taken"] += 1
    assert outcomes["flooded the log"] == 0
    # Both happen often: the mutations are neither all harmless nor all hopeless.
    assert outcomes["refused"] > NUM_FRAMES // 2
    assert outcomes["taken"] > NUM_FRAMES // 100
