"""How many prefill nodes for how many decode nodes, so that only storage links are full (2.5).

Every node reads at the full speed of its storage links, half of the requests on each path. For that
load each other resource is asked whether it keeps up. With g engines and as many compute links of B
bytes per second on a node, storage links that amount to s compute links, memory of M bytes per
second, and P prefill nodes for D decode nodes:

    prefill node, link out of memory      2 B s / g             <= B
    prefill node, link into memory        (B s / g)(1 + D / P)  <= B
    decode node, link out of memory       (B s / g)(P / D + 2)  <= B
    decode node, link into memory         (B s / g)(2 P / D + 1) <= B
    prefill node, memory                  2 B s                 <= M
    decode node, memory                   (3 + 2 P / D) B s     <= M

together  s / (g - s) <= P / D <= min((g - 2 s) / s, (g - s) / (2 s), (M / (B s) - 3) / 2).

The paper writes s <= g for the first line; what it counts gives s <= g / 2 (papers 3D).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """A node: engines with one compute link each, storage links, memory; bytes per second."""

    num_engines: int
    link_bytes_per_second: float
    storage_bytes_per_second: float
    memory_bytes_per_second: float

    @property
    def storage_links(self) -> float:
        """The storage links' speed in compute links: s."""
        return self.storage_bytes_per_second / self.link_bytes_per_second


@dataclass(frozen=True, slots=True)
class Demand:
    """What one resource would have to carry against what it can, in bytes per second."""

    resource: str
    asked: float
    limit: float

    @property
    def is_met(self) -> bool:
        """Whether it keeps up; rounding does not count."""
        return self.asked <= self.limit * (1 + 1e-9)


def demands(links: NodeLinks, num_prefill: int, num_decode: int) -> tuple[Demand, ...]:
    """Return what each resource would carry with storage links full.

    Raises ValueError where there is no prefill or no decode node.
    """
    if num_prefill < 1 or num_decode < 1:
        raise ValueError(f"{num_prefill} prefill and {num_decode} decode nodes cannot serve")
    storage, link = links.storage_bytes_per_second, links.link_bytes_per_second
    share, memory = storage / links.num_engines, links.memory_bytes_per_second
    ratio = num_prefill / num_decode
    return (
        Demand("prefill link out of memory", 2 * share, link),
        Demand("prefill link into memory", share * (1 + 1 / ratio), link),
        Demand("decode link out of memory", share * (ratio + 2), link),
        Demand("decode link into memory", share * (2 * ratio + 1), link),
        Demand("prefill memory", 2 * storage, memory),
        Demand("decode memory", (3 + 2 * ratio) * storage, memory),
    )


def bottlenecks(links: NodeLinks, num_prefill: int, num_decode: int) -> tuple[Demand, ...]:
    """Return the resources that are full before the storage links are; none is how it should be."""
    return tuple(one for one in demands(links, num_prefill, num_decode) if not one.is_met)


def feasible_ratios(links: NodeLinks) -> tuple[float, float] | None:
    """Return the least and the largest P / D without a bottleneck; None where there is none."""
    g, s = links.num_engines, links.storage_links
    memory = links.memory_bytes_per_second / links.storage_bytes_per_second
    if 2 * s > g or memory < 2:
        return None
    least = s / (g - s)
    most = min((g - 2 * s) / s, (g - s) / (2 * s), (memory - 3) / 2)
    return (least, most) if least <= most else None
