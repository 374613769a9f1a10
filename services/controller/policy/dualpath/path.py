"""Which side of a request reads its stored KV (papers 2.7).

Once both engines are known, the whole request is read on the side whose node has the shorter queue
of reads. Where both are equal the prefill side reads: that saves the hop from decode to prefill.
The published code chose a path and an engine in one step and never read on the decode side while
any prefill engine was healthy; that is not DualPath.
"""

from services.controller.policy.dualpath.engines import Side

SIDE_REASONS = {
    Side.PREFILL: "the prefill side's queue of reads is no longer than the decode side's",
    Side.DECODE: "the decode side's queue of reads is shorter",
}


def reading_side(prefill_queue_tokens: int, decode_queue_tokens: int) -> Side:
    """Return the side with the shorter queue of reads; the prefill side where they are equal."""
    return Side.DECODE if decode_queue_tokens < prefill_queue_tokens else Side.PREFILL
