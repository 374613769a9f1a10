#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "flowpath/binding/arguments.hpp"
#include "flowpath/bindings.hpp"
#include "flowpath/cpu_decoder.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace flowpath {

namespace {

using cpu::Batch;
using cpu::BatchFault;
using cpu::DecoderKernels;
using cpu::Element;
using cpu::InstructionSet;

using Table = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T, int dimensions>
using Indices = nb::ndarray<const T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;

// A kernel call takes tensors by address: the call happens several times a layer, and the ordinary
// exchange of one tensor costs more than the smallest kernels. The Python side owns the tensors and
// has checked their shapes; indices are checked here, once a step, by set_batch.
using Address = std::uintptr_t;

void* at(Address address) noexcept { return reinterpret_cast<void*>(address); }

constexpr std::pair<InstructionSet, const char*> set_names[] = {
    {InstructionSet::avx512, "avx512"},
    {InstructionSet::avx2, "avx2"},
    {InstructionSet::portable, "portable"},
};

std::vector<std::string> supported_sets() {
    std::vector<std::string> names;
    for (const auto& [set, name] : set_names) {
        if (cpu::is_supported(set)) {
            names.emplace_back(name);
        }
    }
    return names;
}

InstructionSet find_set(const std::string& name, std::int32_t head_dim) {
    if (name.empty()) {
        return cpu::widest_set(head_dim);
    }
    for (const auto& [set, known] : set_names) {
        if (name == known && cpu::is_supported(set) &&
            head_dim % (2 * cpu::kernels_of(set, Element::float32).lanes) == 0) {
            return set;
        }
    }
    throw nb::value_error(("instruction set '" + name +
                           "' is unknown, not supported here, or too wide for the head size")
                              .c_str());
}

const char* describe(BatchFault fault) {
    switch (fault) {
        case BatchFault::none: break;
        case BatchFault::lengths: return "positions, slots and tables differ in length";
        case BatchFault::position: return "a position lies outside of the rotary tables";
        case BatchFault::slot: return "a slot lies outside of the pool";
        case BatchFault::chunk: return "chunks do not follow each other over all other tokens";
        case BatchFault::table: return "a block table is too short or names a block not in the pool";
    }
    return "the batch is invalid";
}

// Lets other Python threads run during a call that takes long enough to be worth the switch.
class LongCall {
public:
    explicit LongCall(bool is_long) {
        if (is_long) {
            release_.emplace();
        }
    }

private:
    std::optional<nb::gil_scoped_release> release_;
};

class BoundKernels {
public:
    BoundKernels(nb::handle pool, std::int32_t num_layers, std::int32_t block_size,
                 std::int32_t num_kv_heads, std::int32_t head_dim, std::int64_t block_bytes,
                 const std::string& dtype, std::int32_t num_heads, Table cosine, Table sine,
                 int num_threads, const std::string& instruction_set)
        : pool_(pool, BufferView::Access::write), cosine_(std::move(cosine)),
          sine_(std::move(sine)) {
        if (dtype != "float32" && dtype != "bfloat16") {
            throw nb::value_error(("dtype '" + dtype + "' is not supported").c_str());
        }
        const Element element = dtype == "float32" ? Element::float32 : Element::bfloat16;
        if (num_layers < 1 || block_size < 1 || num_kv_heads < 1 || head_dim < 8 ||
            head_dim % 8 != 0 || num_heads < 1 || num_heads % num_kv_heads != 0) {
            throw nb::value_error("the layer shape is invalid");
        }
        const std::int64_t plane =
            static_cast<std::int64_t>(block_size) * num_kv_heads * head_dim *
            static_cast<std::int64_t>(cpu::element_bytes(element));
        if (block_bytes < 2 * plane * num_layers || block_bytes % 4 != 0) {
            throw nb::value_error("block_bytes does not hold the layers");
        }
        const auto half = static_cast<std::size_t>(head_dim / 2);
        if (cosine_.shape(1) != half || sine_.shape(1) != half ||
            cosine_.shape(0) != sine_.shape(0)) {
            throw nb::value_error("the rotary tables must be (positions, head_dim / 2)");
        }
        const cpu::PoolView view{pool_.writable_bytes().data(),
                                 static_cast<std::int64_t>(pool_.size()) / block_bytes,
                                 block_bytes,
                                 2 * plane,
                                 plane,
                                 block_size,
                                 num_kv_heads,
                                 head_dim};
        kernels_.emplace(cpu::DecoderShape{view, num_layers, num_heads,
                                           static_cast<std::int64_t>(cosine_.shape(0)), element},
                         cosine_.data(), sine_.data(), num_threads,
                         find_set(instruction_set, head_dim));
    }

    [[nodiscard]] const char* instruction_set() const { return kernels_->instruction_set(); }

    void set_batch(const Indices<std::int32_t, 1>& positions, const Indices<std::int64_t, 1>& slots,
                   const Indices<std::int32_t, 2>& tables, const Indices<std::int32_t, 2>& chunks) {
        if (chunks.shape(1) != 3) {
            throw nb::value_error("chunks must be (n, 3): first token, last token, start");
        }
        Batch batch;
        batch.positions.assign(positions.data(), positions.data() + positions.size());
        batch.slots.assign(slots.data(), slots.data() + slots.size());
        batch.tables.assign(tables.data(), tables.data() + tables.size());
        for (std::size_t i = 0; i < chunks.shape(0); ++i) {
            batch.chunks.push_back({chunks(i, 0), chunks(i, 1), chunks(i, 2)});
        }
        batch.num_paged = static_cast<std::int64_t>(tables.shape(0)) -
                          static_cast<std::int64_t>(chunks.shape(0));
        batch.table_width = static_cast<std::int64_t>(tables.shape(1));
        const BatchFault fault = kernels_->set_batch(std::move(batch));
        if (fault != BatchFault::none) {
            throw nb::value_error(describe(fault));
        }
        num_tokens_ = static_cast<std::int64_t>(positions.size());
        num_positions_ = 0;
        for (std::size_t token = 0; token < positions.size(); ++token) {
            num_positions_ += positions(token) + 1;
        }
    }

    void rotate_store(std::int32_t layer, Address qkv, Address q_weight, Address k_weight,
                      float epsilon) {
        check_layer(layer);
        const cpu::DecoderShape& shape = kernels_->shape();
        const std::int64_t heads = shape.num_heads + 2 * shape.pool.num_kv_heads;
        const LongCall call(kernels_->is_long(num_tokens_ * heads * shape.pool.head_dim));
        kernels_->rotate_store(layer, at(qkv), at(q_weight), at(k_weight), epsilon);
    }

    void attend(std::int32_t layer, Address qkv, Address out, std::int32_t window, float scale) {
        check_layer(layer);
        const cpu::DecoderShape& shape = kernels_->shape();
        const LongCall call(
            kernels_->is_long(num_positions_ * shape.num_heads * shape.pool.head_dim));
        kernels_->attend(layer, at(qkv), at(out), window, scale);
    }

    void rms_norm(Address residual, Address delta, Address weight, Address out, std::int64_t rows,
                  std::int64_t size, float epsilon) const {
        const LongCall call(kernels_->is_long(rows * size));
        kernels_->rms_norm({at(residual), at(delta), at(weight), at(out), size, epsilon}, rows);
    }

    void silu_mul(Address gate_up, Address out, std::int64_t rows, std::int64_t size) const {
        const LongCall call(kernels_->is_long(rows * size));
        kernels_->silu_mul(at(gate_up), at(out), rows, size);
    }

private:
    void check_layer(std::int32_t layer) const {
        if (layer < 0 || layer >= kernels_->shape().num_layers) {
            throw nb::index_error("no such layer");
        }
    }

    BufferView pool_;
    Table cosine_;
    Table sine_;
    std::int64_t num_tokens_ = 0;
    std::int64_t num_positions_ = 0;
    std::optional<DecoderKernels> kernels_;
};

}  // namespace

void bind_cpu_kernels(nb::module_& m) {
    m.def("cpu_instruction_sets", supported_sets,
          "Names of the instruction sets that the CPU kernels can use here, widest first.");
    nb::class_<BoundKernels>(m, "CpuKernels",
                             "What a decoder layer does beside its matrix products.")
        .def(nb::init<nb::handle, std::int32_t, std::int32_t, std::int32_t, std::int32_t,
                      std::int64_t, const std::string&, std::int32_t, Table, Table, int,
                      const std::string&>(),
             "pool"_a, nb::kw_only(), "num_layers"_a, "block_size"_a, "num_kv_heads"_a,
             "head_dim"_a, "block_bytes"_a, "dtype"_a, "num_heads"_a, "cosine"_a, "sine"_a,
             "num_threads"_a = 1, "instruction_set"_a = "")
        .def_prop_ro("instruction_set", &BoundKernels::instruction_set)
        .def("set_batch", &BoundKernels::set_batch, "positions"_a, "slots"_a, "tables"_a,
             "chunks"_a)
        .def("rotate_store", &BoundKernels::rotate_store, "layer"_a, "qkv"_a, "q_weight"_a,
             "k_weight"_a, "epsilon"_a)
        .def("attend", &BoundKernels::attend, "layer"_a, "qkv"_a, "out"_a, "window"_a, "scale"_a)
        .def("rms_norm", &BoundKernels::rms_norm, "residual"_a, "delta"_a, "weight"_a, "out"_a,
             "rows"_a, "size"_a, "epsilon"_a)
        .def("silu_mul", &BoundKernels::silu_mul, "gate_up"_a, "out"_a, "rows"_a, "size"_a);
}

}  // namespace flowpath
