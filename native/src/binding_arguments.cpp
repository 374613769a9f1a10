#include "flowpath/binding/arguments.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <string>

namespace nb = nanobind;

namespace flowpath {

namespace {

std::int32_t narrow(std::int64_t value, const char* name) {
    if (value < INT32_MIN || value > INT32_MAX) {
        const std::string text = std::string(name) + ": " + std::to_string(value) +
                                 " is not a 32-bit block number";
        throw nb::value_error(text.c_str());
    }
    return static_cast<std::int32_t>(value);
}

[[noreturn]] void refuse_type(const char* name, const char* expected) {
    throw nb::type_error((std::string(name) + " must be " + expected).c_str());
}

}  // namespace

BufferView::BufferView(nb::handle object, Access access) {
    const int flags = access == Access::write ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
        throw nb::python_error();
    }
}

std::vector<std::int32_t> int32_list(nb::handle object, const char* name) {
    nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> array;
    if (nb::try_cast(object, array, false)) {
        return {array.data(), array.data() + array.size()};
    }
    std::vector<std::int64_t> wide;
    if (!nb::try_cast(object, wide)) {
        refuse_type(name, "an int32 array or a sequence of integers");
    }
    std::vector<std::int32_t> list;
    list.reserve(wide.size());
    for (const std::int64_t value : wide) {
        list.push_back(narrow(value, name));
    }
    return list;
}

std::vector<CopyRun> copy_run_list(nb::handle object, const char* name) {
    nb::ndarray<const std::int32_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu> array;
    std::vector<CopyRun> list;
    if (nb::try_cast(object, array, false)) {
        list.reserve(array.shape(0));
        const std::int32_t* row = array.data();
        for (std::size_t i = 0; i < array.shape(0); ++i, row += 3) {
            list.push_back({row[0], row[1], row[2]});
        }
        return list;
    }
    std::vector<std::array<std::int64_t, 3>> wide;
    if (!nb::try_cast(object, wide)) {
        refuse_type(name, "an int32 array of shape (k, 3) or a sequence of (src, dst, length)");
    }
    list.reserve(wide.size());
    for (const auto& [src, dst, length] : wide) {
        list.push_back({narrow(src, name), narrow(dst, name), narrow(length, name)});
    }
    return list;
}

}  // namespace flowpath
