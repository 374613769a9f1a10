#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "flowpath/binding/arguments.hpp"
#include "flowpath/bindings.hpp"
#include "flowpath/storage/aligned_memory.hpp"
#include "flowpath/storage/block_io.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace flowpath {

namespace {

using Paths = std::vector<std::string>;
using Offsets = std::vector<std::int64_t>;

[[noreturn]] void refuse(const std::string& what) { throw nb::value_error(what.c_str()); }

std::size_t checked_pages(std::int64_t num_bytes, const char* name) {
    // An operation of io_uring counts its bytes in 32 bits; the kernel moves less than 2 GiB.
    if (num_bytes < 1 || num_bytes % page_bytes != 0 || num_bytes > (std::int64_t{1} << 30)) {
        refuse(std::string(name) + "=" + std::to_string(num_bytes) +
               " must be a multiple of 4096, and at most 1 GiB");
    }
    return static_cast<std::size_t>(num_bytes);
}

void check_offsets(const Paths& paths, const Offsets& offsets, std::size_t buffer_bytes,
                   std::size_t num_bytes) {
    if (paths.size() != offsets.size()) {
        refuse(std::to_string(paths.size()) + " paths and " + std::to_string(offsets.size()) +
               " offsets");
    }
    for (const std::int64_t offset : offsets) {
        if (offset < 0 || static_cast<std::size_t>(offset) > buffer_bytes ||
            buffer_bytes - static_cast<std::size_t>(offset) < num_bytes) {
            refuse("offset " + std::to_string(offset) + " leaves no room for " +
                   std::to_string(num_bytes) + " bytes in a buffer of " +
                   std::to_string(buffer_bytes));
        }
    }
}

// An engine and what Python lent it. Calls of several threads wait for each other.
class BlockFiles {
public:
    BlockFiles(const std::string& engine, int root_fd, std::int64_t queue_depth, bool is_direct) {
        if (queue_depth < 1 || queue_depth > static_cast<std::int64_t>(max_queue_depth)) {
            refuse("queue_depth=" + std::to_string(queue_depth) + " must be 1 to 1024");
        }
        const BlockIoConfig config{root_fd, static_cast<std::size_t>(queue_depth), is_direct};
        if (engine == "io_uring") {
            io_ = make_uring_block_io(config);
            if (io_ == nullptr) {
                throw nb::builtin_exception(nb::exception_type::runtime_error,
                                            "this system has or allows no io_uring");
            }
        } else if (engine == "threads") {
            io_ = make_thread_block_io(config);
        } else {
            refuse("engine " + engine + " is neither io_uring nor threads");
        }
    }

    bool register_memory(const std::vector<nb::object>& buffers) {
        std::vector<std::unique_ptr<BufferView>> views;
        std::vector<std::span<std::byte>> regions;
        for (const nb::object& buffer : buffers) {
            views.push_back(std::make_unique<BufferView>(buffer, BufferView::Access::write));
            regions.push_back(views.back()->writable_bytes());
        }
        bool is_registered = false;
        {
            const nb::gil_scoped_release without_gil;
            const std::lock_guard lock(mutex_);
            is_registered = io_->register_memory(regions);
            lent_.swap(views);
        }
        return is_registered;  // the views of before end here, with the GIL
    }

    nb::tuple read(const Paths& paths, nb::handle buffer, const Offsets& offsets,
                   std::int64_t payload_bytes_argument) {
        BufferView view(buffer, BufferView::Access::write);
        const std::size_t payload_bytes = checked_pages(payload_bytes_argument, "payload_bytes");
        check_offsets(paths, offsets, view.size(), payload_bytes);
        std::vector<BlockRead> reads;
        reads.reserve(paths.size());
        for (std::size_t i = 0; i < paths.size(); ++i) {
            reads.push_back({paths[i].c_str(), view.writable_bytes().data() + offsets[i]});
        }
        std::vector<std::int32_t> outcomes(paths.size());
        std::string heads(paths.size() * header_head_bytes, '\0');
        {
            const nb::gil_scoped_release without_gil;
            const std::lock_guard lock(mutex_);
            io_->read(reads, payload_bytes, outcomes, reinterpret_cast<std::byte*>(heads.data()));
        }
        return nb::make_tuple(nb::cast(outcomes), nb::bytes(heads.data(), heads.size()));
    }

    std::vector<std::int32_t> write(const Paths& paths, nb::handle buffer, const Offsets& offsets,
                                    std::int64_t num_bytes_argument) {
        const BufferView view(buffer, BufferView::Access::read);
        const std::size_t num_bytes = checked_pages(num_bytes_argument, "num_bytes");
        check_offsets(paths, offsets, view.size(), num_bytes);
        std::vector<BlockWrite> writes;
        writes.reserve(paths.size());
        for (std::size_t i = 0; i < paths.size(); ++i) {
            writes.push_back({paths[i].c_str(), view.bytes().data() + offsets[i]});
            if (!is_page_aligned(writes.back().from)) {
                refuse("offset " + std::to_string(offsets[i]) + " is not aligned to 4096");
            }
        }
        std::vector<std::int32_t> outcomes(paths.size());
        {
            const nb::gil_scoped_release without_gil;
            const std::lock_guard lock(mutex_);
            io_->write(writes, num_bytes, outcomes);
        }
        return outcomes;
    }

private:
    std::unique_ptr<BlockIo> io_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<BufferView>> lent_;
};

bool has_io_uring() { return make_uring_block_io({-1, 1, false}) != nullptr; }

// Copies the payload behind the header and completes the header, in one pass over the payload.
void seal_block(nb::handle target, nb::handle head, nb::handle payload) {
    BufferView into(target, BufferView::Access::write);
    const BufferView start(head, BufferView::Access::read);
    const BufferView data(payload, BufferView::Access::read);
    if (into.size() != page_bytes + data.size() || start.size() > header_head_bytes) {
        refuse("a header of " + std::to_string(start.size()) + " bytes and a payload of " +
               std::to_string(data.size()) + " do not make a block of " +
               std::to_string(into.size()) + " bytes");
    }
    const nb::gil_scoped_release without_gil;
    seal_into(into.writable_bytes(), start.bytes(), data.bytes());
}

}  // namespace

void bind_storage(nb::module_& m) {
    m.def("has_io_uring", &has_io_uring, "Whether this system has and allows io_uring.");
    m.def("seal_block", &seal_block, "target"_a, "head"_a, "payload"_a,
          "Writes a whole block file into memory: header, checksums, payload.");
    nb::class_<BlockFiles>(m, "BlockFiles", "Reads and writes block files, many at a time.")
        .def(nb::init<const std::string&, int, std::int64_t, bool>(), "engine"_a, "root_fd"_a,
             "queue_depth"_a, "is_direct"_a)
        .def("register_memory", &BlockFiles::register_memory, "buffers"_a,
             "Pins memory that is used often, in place of what was pinned before.")
        .def("read", &BlockFiles::read, "paths"_a, "buffer"_a, "offsets"_a, "payload_bytes"_a,
             "Reads and verifies payloads to offsets of the buffer: (outcomes, heads).")
        .def("write", &BlockFiles::write, "paths"_a, "buffer"_a, "offsets"_a, "num_bytes"_a,
             "Creates files and syncs their data; returns the outcomes.");
}

}  // namespace flowpath
