import pytest

from common.cuda.handles import OpenedHandles


class Mappings:
    """Maps and unmaps as CUDA does, which refuses to map the same memory twice."""

    def __init__(self) -> None:
        self.mapped: dict[tuple[int, int], bytes] = {}
        self.is_failing = False

    def open(self, device: int, handle: bytes) -> int:
        if self.is_failing or handle in self.mapped.values():
            raise RuntimeError("cannot map")
        address = 4096 * (1 + len(self.mapped))
        self.mapped[device, address] = handle
        return address

    def close(self, device: int, address: int) -> None:
        del self.mapped[device, address]


def test_a_handle_is_mapped_once_and_unmapped_with_its_last_user() -> None:
    mappings = Mappings()
    handles = OpenedHandles(mappings.open, mappings.close)
    first = handles.open(0, b"a")
    assert handles.open(0, b"a") == first
    assert handles.open(0, b"b") != first
    handles.close(0, b"a")
    assert len(mappings.mapped) == 2
    handles.close(0, b"a")
    assert list(mappings.mapped.values()) == [b"b"]
    with pytest.raises(KeyError):
        handles.close(0, b"a")
    assert handles.open(0, b"a") > 0


def test_a_failed_mapping_counts_no_user() -> None:
    mappings = Mappings()
    handles = OpenedHandles(mappings.open, mappings.close)
    mappings.is_failing = True
    with pytest.raises(RuntimeError):
        handles.open(1, b"a")
    mappings.is_failing = False
    handles.open(1, b"a")
    handles.close(1, b"a")
    assert mappings.mapped == {}
