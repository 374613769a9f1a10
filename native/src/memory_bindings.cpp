#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "flowpath/binding/arguments.hpp"
#include "flowpath/bindings.hpp"
#include "flowpath/memory/alignment.hpp"
#include "flowpath/memory/checksum.hpp"
#include "flowpath/memory/piece_copy.hpp"
#include "flowpath/memory/run_copy.hpp"
#include "flowpath/memory/segment_allocator.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace flowpath {

namespace {

using RunPair = std::pair<Blocks, Blocks>;
using RunPairs = std::vector<RunPair>;

[[noreturn]] void refuse(const std::string& what, Status status) {
    throw nb::value_error((what + " " + describe(status)).c_str());
}

std::string name_run(std::size_t item, RunPair run) {
    return "run " + std::to_string(item) + " (start=" + std::to_string(run.first) +
           ", length=" + std::to_string(run.second) + ")";
}

std::string name_copy(std::size_t item, CopyRun run) {
    return "run " + std::to_string(item) + " (src=" + std::to_string(run.src) +
           ", dst=" + std::to_string(run.dst) + ", length=" + std::to_string(run.length) + ")";
}

RunPairs to_pairs(const std::vector<Run>& runs) {
    RunPairs pairs;
    pairs.reserve(runs.size());
    for (const Run run : runs) {
        pairs.emplace_back(run.start, run.length);
    }
    return pairs;
}

SegmentAllocator make_allocator(Blocks num_blocks, Blocks min_remainder) {
    if (num_blocks < 1 || num_blocks > max_pool_blocks) {
        refuse("num_blocks=" + std::to_string(num_blocks), Status::out_of_range);
    }
    if (min_remainder < 0 || min_remainder > num_blocks) {
        refuse("min_remainder=" + std::to_string(min_remainder), Status::out_of_range);
    }
    return {num_blocks, min_remainder};
}

std::optional<RunPairs> allocate(SegmentAllocator& self, Blocks count, std::optional<Blocks> tail) {
    std::vector<Run> runs;
    const Outcome outcome = tail ? self.grow(count, *tail, runs) : self.allocate(count, runs);
    switch (outcome.status) {
        case Status::ok: return to_pairs(runs);
        case Status::no_room: return std::nullopt;
        case Status::not_positive: refuse("n=" + std::to_string(count), outcome.status);
        default: refuse("tail=" + std::to_string(tail.value_or(-1)), outcome.status);
    }
}

std::optional<RunPairs> allocate_like(SegmentAllocator& self, const std::vector<Blocks>& lengths) {
    std::vector<Run> runs;
    const Outcome outcome = self.allocate_like(lengths, runs);
    switch (outcome.status) {
        case Status::ok: return to_pairs(runs);
        case Status::no_room: return std::nullopt;
        default:
            refuse("run_lengths[" + std::to_string(outcome.item) +
                       "]=" + std::to_string(lengths[outcome.item]),
                   outcome.status);
    }
}

void release(SegmentAllocator& self, const RunPairs& pairs) {
    std::vector<Run> runs;
    runs.reserve(pairs.size());
    for (const auto& [start, length] : pairs) {
        runs.push_back({start, length});
    }
    if (const Outcome outcome = self.release(runs); !outcome.is_ok()) {
        refuse(name_run(outcome.item, pairs[outcome.item]), outcome.status);
    }
}

void check(const SegmentAllocator& self) {
    if (const std::string problem = self.check(); !problem.empty()) {
        throw std::runtime_error("segment allocator: " + problem);
    }
}

nb::object align_lists(nb::handle src_object, nb::handle dst_object, std::int32_t max_length) {
    const auto src = int32_list(src_object, "src");
    const auto dst = int32_list(dst_object, "dst");
    if (max_length < 0) {
        refuse("max_length=" + std::to_string(max_length), Status::out_of_range);
    }
    std::vector<CopyRun> copies;
    const Outcome outcome = align(src, dst, max_length, copies);
    switch (outcome.status) {
        case Status::ok: return to_numpy<std::int32_t, 3>(std::move(copies));
        case Status::different_lengths:
            refuse("src has " + std::to_string(src.size()) + " blocks, dst " +
                       std::to_string(dst.size()) + ": dst",
                   outcome.status);
        case Status::given_twice:
            throw nb::value_error(
                ("dst block " + std::to_string(dst[outcome.item]) + " is given twice").c_str());
        default:
            refuse("pair " + std::to_string(outcome.item) +
                       " (src=" + std::to_string(src[outcome.item]) +
                       ", dst=" + std::to_string(dst[outcome.item]) + ")",
                   outcome.status);
    }
}

std::size_t checked_block_bytes(std::int64_t block_bytes) {
    if (block_bytes < 1) {
        refuse("block_bytes=" + std::to_string(block_bytes), Status::not_positive);
    }
    return static_cast<std::size_t>(block_bytes);
}

// A copy in preparation: both buffers held, every run examined.
struct PreparedCopy {
    BufferView dst;
    BufferView src;
    std::vector<CopyRun> runs;
    std::size_t block_bytes;

    PreparedCopy(nb::handle dst_object, nb::handle src_object, nb::handle runs_object,
                 std::int64_t block_bytes_argument)
        : dst(dst_object, BufferView::Access::write),
          src(src_object, BufferView::Access::read),
          runs(copy_run_list(runs_object, "runs")),
          block_bytes(checked_block_bytes(block_bytes_argument)) {
        const Outcome outcome = validate_copy(dst.size(), src.size(), runs, block_bytes);
        if (!outcome.is_ok()) {
            refuse(name_copy(outcome.item, runs[outcome.item]) + " of " +
                       std::to_string(src.size() / block_bytes) + " source and " +
                       std::to_string(dst.size() / block_bytes) + " target blocks",
                   outcome.status);
        }
    }
};

std::size_t copy_runs_between(nb::handle dst, nb::handle src, nb::handle runs,
                              std::int64_t block_bytes) {
    PreparedCopy copy(dst, src, runs, block_bytes);
    const nb::gil_scoped_release without_gil;
    return copy_runs(copy.dst.writable_bytes(), copy.src.bytes(), copy.runs, copy.block_bytes);
}

nb::object copy_runs_between_checksummed(nb::handle dst, nb::handle src, nb::handle runs,
                                         std::int64_t block_bytes) {
    PreparedCopy copy(dst, src, runs, block_bytes);
    std::size_t num_blocks = 0;
    for (const CopyRun run : copy.runs) {
        num_blocks += static_cast<std::size_t>(run.length);
    }
    std::vector<std::uint64_t> sums(num_blocks);
    {
        const nb::gil_scoped_release without_gil;
        copy_runs_checksummed(copy.dst.writable_bytes(), copy.src.bytes(), copy.runs,
                              copy.block_bytes, sums);
    }
    return to_numpy<std::uint64_t>(std::move(sums));
}

void copy_streamed_between(nb::handle dst_object, nb::handle src_object) {
    BufferView dst(dst_object, BufferView::Access::write);
    const BufferView src(src_object, BufferView::Access::read);
    if (dst.size() != src.size()) {
        refuse("src has " + std::to_string(src.size()) + " bytes, dst " +
                   std::to_string(dst.size()) + ": dst",
               Status::different_lengths);
    }
    const nb::gil_scoped_release without_gil;
    copy_streamed(dst.writable_bytes(), src.bytes());
}

std::uint64_t checksum_of(nb::handle data) {
    const BufferView view(data, BufferView::Access::read);
    const nb::gil_scoped_release without_gil;
    return checksum(view.bytes());
}

std::vector<std::string> kernel_names() {
    const auto names = checksum_kernels();
    return {names.begin(), names.end()};
}

std::uint64_t checksum_by_kernel(const std::string& kernel, nb::handle data) {
    const BufferView view(data, BufferView::Access::read);
    std::optional<std::uint64_t> value;
    {
        const nb::gil_scoped_release without_gil;
        value = checksum_with(kernel, view.bytes());
    }
    if (!value) {
        throw nb::value_error(("this machine has no checksum kernel " + kernel).c_str());
    }
    return *value;
}

nb::object checksum_blocks_of(nb::handle pool, nb::handle block_ids,
                              std::int64_t block_bytes_argument) {
    const BufferView view(pool, BufferView::Access::read);
    const auto ids = int32_list(block_ids, "block_ids");
    const std::size_t block_bytes = checked_block_bytes(block_bytes_argument);
    const auto num_blocks = static_cast<std::int64_t>(view.size() / block_bytes);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] < 0 || ids[i] >= num_blocks) {
            refuse("block_ids[" + std::to_string(i) + "]=" + std::to_string(ids[i]) + " of " +
                       std::to_string(num_blocks) + " blocks",
                   Status::out_of_range);
        }
    }
    std::vector<std::uint64_t> sums(ids.size());
    {
        const nb::gil_scoped_release without_gil;
        checksum_blocks(view.bytes(), ids, block_bytes, sums);
    }
    return to_numpy<std::uint64_t>(std::move(sums));
}

std::vector<std::int32_t> ids_within(nb::handle object, const char* name, std::size_t num_blocks) {
    auto ids = int32_list(object, name);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] < 0 || static_cast<std::size_t>(ids[i]) >= num_blocks) {
            refuse(std::string(name) + "[" + std::to_string(i) + "]=" + std::to_string(ids[i]) +
                       " of " + std::to_string(num_blocks) + " blocks",
                   Status::out_of_range);
        }
    }
    return ids;
}

using Six = std::array<std::int64_t, 6>;
using Four = std::array<std::int64_t, 4>;

nb::object copy_pieces_between(nb::handle dst_object, nb::handle src_object, nb::handle dst_list,
                               nb::handle src_list, const Six& pieces, const Four& rest,
                               std::int64_t src_block_bytes, std::int64_t dst_block_bytes) {
    const PieceCopy copy{{pieces[0], pieces[1], pieces[2], pieces[3], pieces[4], pieces[5]},
                         {rest[0], rest[1], rest[2], rest[3]},
                         checked_block_bytes(src_block_bytes),
                         checked_block_bytes(dst_block_bytes)};
    if (!is_inside(copy)) {
        refuse("a piece or the rest behind the pieces", Status::out_of_range);
    }
    BufferView dst(dst_object, BufferView::Access::write);
    const BufferView src(src_object, BufferView::Access::read);
    const auto dst_ids = ids_within(dst_list, "dst_ids", dst.size() / copy.dst_block_bytes);
    const auto src_ids = ids_within(src_list, "src_ids", src.size() / copy.src_block_bytes);
    if (dst_ids.size() != src_ids.size()) {
        refuse("src_ids has " + std::to_string(src_ids.size()) + " blocks, dst_ids " +
                   std::to_string(dst_ids.size()) + ": dst_ids",
               Status::different_lengths);
    }
    std::vector<std::uint64_t> sums(dst_ids.size());
    {
        const nb::gil_scoped_release without_gil;
        copy_pieces(dst.writable_bytes(), src.bytes(), dst_ids, src_ids, copy, sums);
    }
    return to_numpy<std::uint64_t>(std::move(sums));
}

void bind_allocator(nb::module_& m) {
    nb::class_<SegmentAllocator>(m, "SegmentAllocator",
                                 "Hands out runs of adjacent blocks of one pool.")
        .def(nb::new_(&make_allocator), "num_blocks"_a, "min_remainder"_a)
        .def("allocate", &allocate, "n"_a, "tail"_a = nb::none(),
             "Takes n blocks, all or nothing; a request that ends at tail - 1 grows in place first.")
        .def("allocate_like", &allocate_like, "run_lengths"_a,
             "Takes room that mirrors the sender's run lengths, in their order.")
        .def("free", &release, "runs"_a,
             "Gives runs back, or raises ValueError naming a run and changes nothing.")
        .def("is_free", [](const SegmentAllocator& self, Blocks start,
                           Blocks length) { return self.is_free({start, length}); },
             "start"_a, "length"_a)
        .def("free_segments",
             [](const SegmentAllocator& self) { return to_pairs(self.free_segments()); },
             "The free runs by start; no two touch.")
        .def("check", &check, "Raises RuntimeError with the first broken invariant.")
        .def_prop_ro("num_blocks", &SegmentAllocator::num_blocks)
        .def_prop_ro("min_remainder", &SegmentAllocator::min_remainder)
        .def_prop_ro("num_free", &SegmentAllocator::num_free)
        .def_prop_ro("largest_free", &SegmentAllocator::largest_free)
        .def_prop_ro("num_segments", &SegmentAllocator::num_segments)
        .def_prop_ro("fragmentation", &SegmentAllocator::fragmentation);
}

}  // namespace

void bind_memory(nb::module_& m) {
    bind_allocator(m);
    m.def("align", &align_lists, "src"_a, "dst"_a, "max_length"_a = 0,
          "The fewest contiguous copies for src[i] -> dst[i]: int32 rows (src, dst, length).");
    m.def("copy_runs", &copy_runs_between, "dst"_a, "src"_a, "runs"_a, "block_bytes"_a,
          "Copies rows (src, dst, length) of blocks between two buffers; returns the bytes copied.");
    m.def("copy_runs_checksummed", &copy_runs_between_checksummed, "dst"_a, "src"_a, "runs"_a,
          "block_bytes"_a, "Copies, and returns the checksum of each block in the runs' order.");
    m.def("copy_pieces", &copy_pieces_between, "dst"_a, "src"_a, "dst_ids"_a, "src_ids"_a,
          nb::kw_only(), "pieces"_a, "rest"_a, "src_block_bytes"_a, "dst_block_bytes"_a,
          "Copies parts of blocks; returns the sum of the checksum's terms of what was written.");
    m.def("copy_streamed", &copy_streamed_between, "dst"_a, "src"_a,
          "Copies past the caches and does nothing else: what memory gives a copy at best.");
    m.def("checksum", &checksum_of, "data"_a, "The 64-bit checksum of the bytes.");
    m.def("checksum_kernels", &kernel_names,
          "The names of the kernels that this machine can run, the fastest first.");
    m.def("checksum_with", &checksum_by_kernel, "kernel"_a, "data"_a,
          "The checksum by the named kernel, for comparison.");
    m.def("checksum_blocks", &checksum_blocks_of, "buf"_a, "block_ids"_a, "block_bytes"_a,
          "The checksum of each named block.");
}

}  // namespace flowpath
