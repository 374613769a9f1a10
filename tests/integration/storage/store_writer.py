"""A process that writes chains to a folder until it is killed, or as many as it is told to.

Arguments: folder, capacity in blocks, name of its chains, blocks in a chain, number of chains (0:
until it is killed). It prints a line when a chain is stored.
"""

import itertools
import sys
from pathlib import Path

from tests.support.stored_blocks import chain, open_file_store, read_chain, store_chain


def main(root: str, capacity: str, name: str, length: str, num_chains: str) -> None:
    store = open_file_store(Path(root), int(capacity))
    for number in itertools.islice(itertools.count(), int(num_chains) or None):
        hashes = chain(f"{name} {number}", int(length))
        store_chain(store, hashes)
        found = store.longest_prefix(hashes)
        hits = read_chain(store, hashes)
        print(number, found, sum(hits), flush=True)
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
