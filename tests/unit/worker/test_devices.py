"""Where workers compute, and what is left for their pools."""

import pytest

from common.config.settings import Settings
from common.errors import ConfigError
from common.worker.devices import GpuPlace, gpu_pool_bytes, place_worker

GIB = 2**30


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected"),
    [
        ("auto", 0, None),
        ("cpu", 4, None),
        ("auto", 1, GpuPlace(0, 2)),
        ("cuda", 2, GpuPlace(1, 1)),
        ("cuda:3", 4, GpuPlace(3, 2)),
    ],
)
def test_the_second_of_two_workers_computes_where_the_settings_say(
    device: str, num_gpus: int, expected: GpuPlace | None
) -> None:
    assert place_worker(Settings(device=device), "decode-0", num_gpus) == expected


def test_workers_take_the_gpus_in_turn() -> None:
    settings = Settings(prefill=2, decode=3)
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    places = [place_worker(settings, name, 2) for name in names]
    assert places == [
        GpuPlace(0, 3),
        GpuPlace(1, 2),
        GpuPlace(0, 3),
        GpuPlace(1, 2),
        GpuPlace(0, 3),
    ]


def test_workers_that_are_added_under_load_find_their_share() -> None:
    settings = Settings(prefill=1, decode=1, max_workers=5)
    names = ["prefill-0", "decode-0", "extra-0", "extra-1", "extra-2"]
    places = [place_worker(settings, name, 2) for name in names]
    assert [place and place.device_index for place in places] == [0, 1, 0, 1, 0]
    assert [place and place.num_workers for place in places] == [3, 2, 3, 2, 3]
    on_one = Settings(max_workers=5, device="cuda:1")
    assert place_worker(on_one, "extra-0", 2) == GpuPlace(1, 5)


def test_a_worker_of_several_ranks_has_as_many_gpus() -> None:
    settings = Settings(prefill=1, decode=2, tensor_parallel=2)
    places = [place_worker(settings, name, 5) for name in ("prefill-0", "decode-0", "decode-1")]
    assert places == [GpuPlace(0, 2, 2), GpuPlace(2, 1, 2), GpuPlace(0, 2, 2)]
    assert places[1] is not None
    assert places[1].device_indices == (2, 3)
    assert place_worker(Settings(tensor_parallel=2, device="cuda:1"), "decode-0", 3) == GpuPlace(
        1, 2, 2
    )
    for wrong in (Settings(tensor_parallel=4), Settings(tensor_parallel=2, device="cuda:2")):
        with pytest.raises(ConfigError, match="there are 3 GPUs, from cuda:0"):
            place_worker(wrong, "decode-0", 3)


@pytest.mark.parametrize(("worker_id", "index"), [("other-7", 1), ("decode-4", 0), ("mine", 0)])
def test_a_worker_started_on_its_own_goes_by_its_number(worker_id: str, index: int) -> None:
    assert place_worker(Settings(), worker_id, 2) == GpuPlace(index, 1)


@pytest.mark.parametrize(
    ("device", "num_gpus", "message"),
    [("cuda", 0, "torch sees no GPU"), ("cuda:2", 2, "there are 2 GPUs, from cuda:0")],
)
def test_a_gpu_that_is_not_there_is_refused(device: str, num_gpus: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place_worker(Settings(device=device), "decode-0", num_gpus)


def test_the_pool_takes_what_weights_and_steps_leave_of_the_share() -> None:
    settings = Settings(gpu_memory_fraction=0.5)
    left = gpu_pool_bytes(
        settings, GpuPlace(0, 2), total_bytes=80 * GIB, used_bytes=5 * GIB, step_bytes=GIB
    )
    assert left == 14 * GIB


def test_a_pool_of_a_given_size_is_taken_as_it_is() -> None:
    settings = Settings(kv_bytes=3 * GIB)
    left = gpu_pool_bytes(
        settings, GpuPlace(0, 2), total_bytes=4 * GIB, used_bytes=5 * GIB, step_bytes=GIB
    )
    assert left == 3 * GIB


def test_weights_that_leave_no_room_are_named() -> None:
    with pytest.raises(ConfigError, match=r"weights of 16\.0 GiB and 1\.0 GiB for a step"):
        gpu_pool_bytes(
            Settings(), GpuPlace(1, 2), total_bytes=24 * GIB, used_bytes=16 * GIB, step_bytes=GIB
        )
