#include "flowpath/storage/uring.hpp"

#ifdef FLOWPATH_HAS_URING

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace flowpath {

namespace {

int setup_call(unsigned num_entries, io_uring_params& params) noexcept {
    return static_cast<int>(syscall(SYS_io_uring_setup, num_entries, &params));
}

// Newer flags first: they spare interrupts of the waiting thread.
int open_ring(unsigned num_entries, io_uring_params& params) noexcept {
#ifdef IORING_SETUP_COOP_TASKRUN
    params = {};
    params.flags = IORING_SETUP_COOP_TASKRUN;
    if (const int fd = setup_call(num_entries, params); fd >= 0 || errno != EINVAL) {
        return fd;
    }
#endif
    params = {};
    return setup_call(num_entries, params);
}

}  // namespace

std::unique_ptr<Uring> Uring::open(unsigned num_entries) {
    std::unique_ptr<Uring> ring(new Uring());
    return ring->set_up(num_entries) ? std::move(ring) : nullptr;
}

bool Uring::map(Mapping& mapping, std::size_t num_bytes, long long offset) noexcept {
    void* const address = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(offset));
    if (address == MAP_FAILED) {
        return false;
    }
    mapping = {address, num_bytes};
    return true;
}

bool Uring::set_up(unsigned num_entries) {
    io_uring_params params;
    fd_ = open_ring(num_entries, params);
    // Every operation that is used came with Linux 5.6, as did this feature.
    if (fd_ < 0 || (params.features & IORING_FEAT_RW_CUR_POS) == 0) {
        return false;
    }
    const std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    if (!map(sq_, sq_bytes, IORING_OFF_SQ_RING) || !map(cq_, cq_bytes, IORING_OFF_CQ_RING) ||
        !map(sqe_, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)) {
        return false;
    }
    auto* const sq = static_cast<char*>(sq_.address);
    auto* const cq = static_cast<char*>(cq_.address);
    sq_tail_ = reinterpret_cast<unsigned*>(sq + params.sq_off.tail);
    sq_mask_ = *reinterpret_cast<unsigned*>(sq + params.sq_off.ring_mask);
    sq_array_ = reinterpret_cast<unsigned*>(sq + params.sq_off.array);
    sqes_ = static_cast<io_uring_sqe*>(sqe_.address);
    cq_head_ = reinterpret_cast<unsigned*>(cq + params.cq_off.head);
    cq_tail_ = reinterpret_cast<unsigned*>(cq + params.cq_off.tail);
    cq_mask_ = *reinterpret_cast<unsigned*>(cq + params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(cq + params.cq_off.cqes);
    return true;
}

Uring::~Uring() {
    for (const Mapping& mapping : {sqe_, cq_, sq_}) {
        if (mapping.address != nullptr) {
            munmap(mapping.address, mapping.num_bytes);
        }
    }
    if (fd_ >= 0) {
        close(fd_);
    }
}

io_uring_sqe* Uring::next_entry() noexcept {
    const unsigned tail = *sq_tail_;
    const unsigned index = tail & sq_mask_;
    io_uring_sqe* const entry = &sqes_[index];
    std::memset(entry, 0, sizeof *entry);
    sq_array_[index] = index;
    // The kernel looks at the entries no sooner than in submit.
    std::atomic_ref(*sq_tail_).store(tail + 1, std::memory_order_release);
    ++num_prepared_;
    return entry;
}

int Uring::submit(unsigned num_awaited) noexcept {
    if (num_prepared_ == 0 && num_awaited == 0) {
        return 0;  // completions that are on their way come with any other call into the kernel
    }
    const long done = syscall(SYS_io_uring_enter, fd_, num_prepared_, num_awaited,
                              IORING_ENTER_GETEVENTS, nullptr, std::size_t{0});
    if (done >= 0) {
        num_prepared_ -= static_cast<unsigned>(done);
        return 0;
    }
    return errno == EINTR || errno == EAGAIN || errno == EBUSY ? 0 : errno;
}

int Uring::register_buffers(std::span<const iovec> buffers) noexcept {
    if (has_buffers_) {
        syscall(SYS_io_uring_register, fd_, IORING_UNREGISTER_BUFFERS, nullptr, 0U);
        has_buffers_ = false;
    }
    if (buffers.empty()) {
        return 0;
    }
    if (syscall(SYS_io_uring_register, fd_, IORING_REGISTER_BUFFERS, buffers.data(),
                static_cast<unsigned>(buffers.size())) < 0) {
        return errno;
    }
    has_buffers_ = true;
    return 0;
}

}  // namespace flowpath

#endif
