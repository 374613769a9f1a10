"""Two-level scheduling: a group with many engines is scheduled as several cells.

The second phase looks at every engine of a group for every request. Above a size the group is cut
into cells of whole nodes; the first phase then chooses among all cells, and the second inside one.
"""

from collections import defaultdict

from services.controller.policy.dualpath.engines import EngineGroup, EngineId, NodeId


def split(group: EngineGroup, max_engines: int) -> list[tuple[EngineId, ...]]:
    """Cut a group into as few cells of about equal size as ``max_engines`` allows.

    A node stays whole, even where it alone is larger. A group of at most ``max_engines`` is one
    cell. Raises ValueError when ``max_engines`` is not positive.
    """
    if max_engines < 1:
        raise ValueError(f"a cell has at least one engine, not {max_engines}")
    by_node: defaultdict[NodeId, list[EngineId]] = defaultdict(list)
    for engine, node in group.nodes.items():
        by_node[node].append(engine)
    cells: list[list[EngineId]] = [[] for _ in range(-(-len(group.nodes) // max_engines))]
    # The largest nodes first, each into the emptiest cell: sizes differ by one node at most.
    for engines in sorted(by_node.values(), key=lambda one: (-len(one), one)):
        emptiest = min(cells, key=len)
        if emptiest and len(emptiest) + len(engines) > max_engines:
            emptiest = []
            cells.append(emptiest)
        emptiest += engines
    return [tuple(sorted(cell)) for cell in cells if cell]
