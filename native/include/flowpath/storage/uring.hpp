// io_uring by its system calls alone: one ring for one thread at a time.
#pragma once

#if __has_include(<linux/io_uring.h>)
#define FLOWPATH_HAS_URING 1

#include <linux/io_uring.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>

namespace flowpath {

class Uring {
public:
    // Null where the kernel refuses (too old, forbidden by seccomp or sysctl, out of memory).
    [[nodiscard]] static std::unique_ptr<Uring> open(unsigned num_entries);
    ~Uring();
    Uring(const Uring&) = delete;
    Uring& operator=(const Uring&) = delete;

    // The next free entry, zeroed; the caller never has more in preparation and in flight than
    // `num_entries`.
    [[nodiscard]] io_uring_sqe* next_entry() noexcept;

    // Submits what was prepared and waits for `num_awaited` completions. Returns 0, then reap and
    // call again (a signal or a lack of memory may have ended it early), or an errno that no repeat
    // will cure.
    [[nodiscard]] int submit(unsigned num_awaited) noexcept;

    // Calls take(user_data, result) for every completion that is there.
    template <typename Take>
    void reap(const Take& take) {
        unsigned head = *cq_head_;
        const unsigned tail = std::atomic_ref(*cq_tail_).load(std::memory_order_acquire);
        while (head != tail) {
            const io_uring_cqe& cqe = cqes_[head & cq_mask_];
            const auto user_data = cqe.user_data;
            const int result = cqe.res;
            ++head;
            std::atomic_ref(*cq_head_).store(head, std::memory_order_release);
            take(user_data, result);
        }
    }

    // Replaces the registered buffers; an empty list only takes them back. 0 or an errno.
    [[nodiscard]] int register_buffers(std::span<const iovec> buffers) noexcept;

private:
    Uring() = default;
    [[nodiscard]] bool set_up(unsigned num_entries);

    struct Mapping {
        void* address = nullptr;
        std::size_t num_bytes = 0;
    };
    [[nodiscard]] bool map(Mapping& mapping, std::size_t num_bytes, long long offset) noexcept;

    int fd_ = -1;
    bool has_buffers_ = false;
    Mapping sq_, cq_, sqe_;
    unsigned* sq_tail_ = nullptr;
    unsigned* sq_array_ = nullptr;
    unsigned sq_mask_ = 0;
    unsigned num_prepared_ = 0;
    io_uring_sqe* sqes_ = nullptr;
    unsigned* cq_head_ = nullptr;
    unsigned* cq_tail_ = nullptr;
    unsigned cq_mask_ = 0;
    io_uring_cqe* cqes_ = nullptr;
};

}  // namespace flowpath

#endif
