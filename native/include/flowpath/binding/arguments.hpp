// Python arguments as plain memory, and plain memory as numpy arrays. Bindings alone include this.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "flowpath/core/runs.hpp"

namespace flowpath {

// A C-contiguous buffer (bytes, memoryview, mmap, numpy array, shared memory), held for the life of
// the view. Made and destroyed with the GIL, usable without it. A wrong object raises TypeError or
// BufferError.
class BufferView {
public:
    enum class Access { read, write };

    BufferView(nanobind::handle object, Access access);
    ~BufferView() { PyBuffer_Release(&view_); }
    BufferView(const BufferView&) = delete;
    BufferView& operator=(const BufferView&) = delete;

    [[nodiscard]] std::size_t size() const noexcept { return static_cast<std::size_t>(view_.len); }
    [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
        return {static_cast<const std::byte*>(view_.buf), size()};
    }
    // Only of a view made with Access::write.
    [[nodiscard]] std::span<std::byte> writable_bytes() noexcept {
        return {static_cast<std::byte*>(view_.buf), size()};
    }

private:
    Py_buffer view_{};
};

// A copy of an int32 array, or of any sequence of integers; a number beyond int32 is a ValueError
// that names the argument.
[[nodiscard]] std::vector<std::int32_t> int32_list(nanobind::handle object, const char* name);

// A copy of an int32 (k, 3) array, or of any sequence of integer triples.
[[nodiscard]] std::vector<CopyRun> copy_run_list(nanobind::handle object, const char* name);

// A numpy array that takes over the vector's memory.
template <typename T, std::size_t columns = 0, typename Element>
[[nodiscard]] nanobind::object to_numpy(std::vector<Element>&& elements) {
    auto* owned = new std::vector<Element>(std::move(elements));
    const nanobind::capsule owner(
        owned, [](void* memory) noexcept { delete static_cast<std::vector<Element>*>(memory); });
    const std::array<std::size_t, 2> shape{owned->size(), columns};
    return nanobind::cast(nanobind::ndarray<nanobind::numpy, T>(
        owned->data(), columns == 0 ? 1 : 2, shape.data(), owner));
}

}  // namespace flowpath
