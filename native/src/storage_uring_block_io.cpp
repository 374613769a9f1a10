#include "flowpath/storage/block_io.hpp"
#include "flowpath/storage/uring.hpp"

#ifdef FLOWPATH_HAS_URING

#include <fcntl.h>
#if __has_include(<linux/openat2.h>)
#include <linux/openat2.h>
#endif
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "flowpath/storage/aligned_memory.hpp"

namespace flowpath {

namespace {

// A larger buffer cannot be registered in one piece.
constexpr std::size_t max_registered_bytes = std::size_t{1} << 30;

// How often a file is read in all when reads come back short although it is long enough.
constexpr int max_attempts = 3;

// Registered memory spares the kernel to look up and hold every page. It takes an operation for each
// of header and payload, which only pays from some pages on.
constexpr std::size_t min_fixed_bytes = 256 * 1024;

// Header and payload of one file are at most two operations at a time.
constexpr unsigned operations_per_file = 2;

// The buffers that the ring knows.
class Registered {
public:
    void assign(std::vector<iovec> buffers) { buffers_ = std::move(buffers); }

    // The index of the buffer that holds the whole range, or -1.
    [[nodiscard]] int find(const std::byte* start, std::size_t num_bytes) const noexcept {
        for (std::size_t i = 0; i < buffers_.size(); ++i) {
            const auto* const first = static_cast<const std::byte*>(buffers_[i].iov_base);
            if (start >= first && start + num_bytes <= first + buffers_[i].iov_len) {
                return static_cast<int>(i);
            }
        }
        return -1;
    }

private:
    std::vector<iovec> buffers_;
};

// One file in flight. A slot is used for one file after the other.
struct Slot {
    std::size_t number = 0;
    std::size_t job = 0;
    int fd = -1;
    bool is_direct = false;
    bool is_syncing = false;
    int num_pending = 0;
    int num_attempts = 0;
    std::int32_t error = 0;  // or what else the outcome is
    std::size_t num_moved = 0;
    std::byte* header = nullptr;
    AlignedMemory staging;
    std::size_t staging_bytes = 0;
    iovec parts[2]{};

    void begin(std::size_t new_job, bool is_direct_file) {
        job = new_job;
        fd = -1;
        is_direct = is_direct_file;
        is_syncing = false;
        num_attempts = 0;
        error = 0;
        num_moved = 0;
    }

    std::byte* staged(std::size_t num_bytes) {
        if (staging_bytes < num_bytes) {
            staging = aligned_memory(num_bytes);
            staging_bytes = num_bytes;
        }
        return staging.get();
    }
};

class Operations {
public:
    Operations(Uring& ring, const Registered& registered, int root_fd)
        : ring_(ring), registered_(registered), root_fd_(root_fd) {}

    // Opens at once where that needs no look at the disk; the descriptor, or -1.
    int open_cached(const Slot& slot, const char* path) const noexcept {
#if defined(SYS_openat2) && defined(RESOLVE_CACHED)
        open_how how{};
        how.flags = static_cast<std::uint64_t>(O_RDONLY | O_CLOEXEC | O_NOFOLLOW |
                                               (slot.is_direct ? O_DIRECT : 0));
        how.resolve = RESOLVE_CACHED;
        return static_cast<int>(syscall(SYS_openat2, root_fd_, path, &how, sizeof how));
#else
        (void)slot;
        (void)path;
        return -1;
#endif
    }

    void open(Slot& slot, const char* path, int flags) {
        const int direct = slot.is_direct ? O_DIRECT : 0;
        io_uring_sqe* const entry = begin(slot, IORING_OP_OPENAT);
        entry->fd = root_fd_;
        entry->addr = reinterpret_cast<std::uintptr_t>(path);
        entry->open_flags = static_cast<unsigned>(flags | direct | O_CLOEXEC | O_NOFOLLOW);
        entry->len = 0640;
    }

    void read_both(Slot& slot, std::byte* into, std::size_t payload_bytes) {
        const int at = payload_bytes < min_fixed_bytes ? -1 : registered_.find(into, payload_bytes);
        const int header_at = at < 0 ? -1 : registered_.find(slot.header, page_bytes);
        if (header_at >= 0) {
            move_fixed(slot, IORING_OP_READ_FIXED, slot.header, page_bytes, 0, header_at);
            move_fixed(slot, IORING_OP_READ_FIXED, into, payload_bytes, page_bytes, at);
            return;
        }
        slot.parts[0] = {slot.header, page_bytes};
        slot.parts[1] = {into, payload_bytes};
        io_uring_sqe* const entry = begin(slot, IORING_OP_READV);
        entry->fd = slot.fd;
        entry->addr = reinterpret_cast<std::uintptr_t>(slot.parts);
        entry->len = 2;
    }

    void write(Slot& slot, const std::byte* from, std::size_t num_bytes, std::size_t offset) {
        if (const int at = registered_.find(from, num_bytes); at >= 0) {
            move_fixed(slot, IORING_OP_WRITE_FIXED, from, num_bytes, offset, at);
            return;
        }
        move(slot, IORING_OP_WRITE, from, num_bytes, offset);
    }

    void sync_data(Slot& slot) {
        io_uring_sqe* const entry = begin(slot, IORING_OP_FSYNC);
        entry->fd = slot.fd;
        entry->fsync_flags = IORING_FSYNC_DATASYNC;
    }

private:
    io_uring_sqe* begin(Slot& slot, std::uint8_t operation) {
        io_uring_sqe* const entry = ring_.next_entry();
        entry->opcode = operation;
        entry->user_data = slot.number;
        ++slot.num_pending;
        return entry;
    }

    io_uring_sqe* move(Slot& slot, std::uint8_t operation, const std::byte* memory,
                       std::size_t num_bytes, std::size_t offset) {
        io_uring_sqe* const entry = begin(slot, operation);
        entry->fd = slot.fd;
        entry->addr = reinterpret_cast<std::uintptr_t>(memory);
        entry->len = static_cast<unsigned>(num_bytes);
        entry->off = offset;
        return entry;
    }

    void move_fixed(Slot& slot, std::uint8_t operation, const std::byte* memory,
                    std::size_t num_bytes, std::size_t offset, int buffer) {
        move(slot, operation, memory, num_bytes, offset)->buf_index =
            static_cast<std::uint16_t>(buffer);
    }

    Uring& ring_;
    const Registered& registered_;
    int root_fd_;
};

// Runs jobs 0 .. num_jobs - 1 with `depth` of them in flight. The machine begins a job with
// start(slot, job); advance(slot, result) takes each result and is true when nothing of the job is
// in flight any more; finish(slot) then does what takes the processor, while other jobs are in
// flight: there are twice as many slots. Returns an errno where the ring itself failed.
template <typename Machine>
int run_jobs(Uring& ring, std::span<Slot> slots, std::size_t num_jobs, Machine& machine) {
    const std::size_t depth = slots.size() / 2;
    std::vector<std::size_t> idle;
    std::vector<std::size_t> moved;
    for (std::size_t i = slots.size(); i-- > 0;) {
        idle.push_back(i);
    }
    std::size_t next = 0;
    std::size_t num_in_flight = 0;
    while (true) {
        while (next < num_jobs && num_in_flight < depth && !idle.empty()) {
            Slot& slot = slots[idle.back()];
            idle.pop_back();
            machine.start(slot, next++);
            ++num_in_flight;
        }
        if (num_in_flight == 0 && moved.empty()) {
            return 0;
        }
        if (const int error = ring.submit(moved.empty() ? 1 : 0); error != 0) {
            return error;
        }
        ring.reap([&](std::uint64_t number, int result) {
            Slot& slot = slots[number];
            --slot.num_pending;
            if (machine.advance(slot, result)) {
                moved.push_back(slot.number);
                --num_in_flight;
            }
        });
        if (!moved.empty()) {
            machine.finish(slots[moved.back()]);
            idle.push_back(moved.back());
            moved.pop_back();
        }
    }
}

class Reader {
public:
    Reader(Operations& operations, std::span<const BlockRead> reads, std::size_t payload_bytes,
           bool is_direct, std::span<std::int32_t> outcomes, std::byte* heads)
        : operations_(operations),
          reads_(reads),
          payload_bytes_(payload_bytes),
          is_direct_(is_direct),
          outcomes_(outcomes),
          heads_(heads) {}

    void start(Slot& slot, std::size_t job) {
        slot.begin(job, is_direct_);
        slot.fd = operations_.open_cached(slot, reads_[job].path);
        if (slot.fd >= 0) {
            read(slot);
        } else {
            operations_.open(slot, reads_[job].path, O_RDONLY);
        }
    }

    bool advance(Slot& slot, int result) {
        if (slot.fd < 0) {
            return opened(slot, result);
        }
        if (result < 0) {
            slot.error = -result;
        } else {
            slot.num_moved += static_cast<std::size_t>(result);
        }
        if (slot.num_pending > 0) {
            return false;
        }
        if (slot.error == 0 && slot.num_moved == page_bytes + payload_bytes_) {
            return true;
        }
        if (slot.error == 0 && is_too_short(slot)) {
            slot.error = block_truncated;
            return true;
        }
        const bool may_repeat = slot.error == 0 || slot.error == EAGAIN || slot.error == EINTR;
        if (!may_repeat || ++slot.num_attempts == max_attempts) {
            slot.error = slot.error != 0 ? slot.error : EIO;
            return true;
        }
        read(slot);
        return false;
    }

    void finish(Slot& slot) {
        outcomes_[slot.job] = slot.error != 0 ? slot.error : verify(slot);
        if (slot.fd >= 0) {
            close(slot.fd);
        }
    }

private:
    bool opened(Slot& slot, int result) {
        if (result == -EINVAL && slot.is_direct) {  // this file system has no direct I/O
            slot.is_direct = false;
            operations_.open(slot, reads_[slot.job].path, O_RDONLY);
            return false;
        }
        if (result < 0) {
            slot.error = -result;
            return true;
        }
        slot.fd = result;
        read(slot);
        return false;
    }

    void read(Slot& slot) {
        slot.error = 0;
        slot.num_moved = 0;
        operations_.read_both(slot, memory_of(slot), payload_bytes_);
    }

    std::byte* memory_of(Slot& slot) {
        std::byte* const into = reads_[slot.job].into;
        return slot.is_direct && !is_page_aligned(into) ? slot.staged(payload_bytes_) : into;
    }

    bool is_too_short(const Slot& slot) const {
        struct stat status{};
        return fstat(slot.fd, &status) == 0 &&
               static_cast<std::size_t>(status.st_size) < page_bytes + payload_bytes_;
    }

    std::int32_t verify(Slot& slot) {
        const std::byte* const payload = memory_of(slot);
        const std::span<const std::byte, page_bytes> header(slot.header, page_bytes);
        const BlockOutcome outcome = verify_seal(header, {payload, payload_bytes_});
        if (outcome == block_ok) {
            std::memcpy(heads_ + slot.job * header_head_bytes, slot.header, header_head_bytes);
            if (payload != reads_[slot.job].into) {
                std::memcpy(reads_[slot.job].into, payload, payload_bytes_);
            }
        }
        return outcome;
    }

    Operations& operations_;
    std::span<const BlockRead> reads_;
    std::size_t payload_bytes_;
    bool is_direct_;
    std::span<std::int32_t> outcomes_;
    std::byte* heads_;
};

class Writer {
public:
    Writer(Operations& operations, std::span<const BlockWrite> writes, std::size_t num_bytes,
           const BlockIoConfig& config, std::span<std::int32_t> outcomes)
        : operations_(operations),
          writes_(writes),
          num_bytes_(num_bytes),
          config_(config),
          outcomes_(outcomes) {}

    void start(Slot& slot, std::size_t job) {
        slot.begin(job, config_.is_direct);
        operations_.open(slot, writes_[job].path, O_WRONLY | O_CREAT | O_EXCL);
    }

    bool advance(Slot& slot, int result) {
        if (slot.fd < 0) {
            return opened(slot, result);
        }
        if (result == -EAGAIN || result == -EINTR) {
            result = 0;
            if (++slot.num_attempts == max_attempts) {
                slot.error = EIO;
                return true;
            }
        } else if (result < 0 || (result == 0 && !slot.is_syncing)) {
            slot.error = result < 0 ? -result : EIO;
            return true;
        } else if (slot.is_syncing) {
            return true;
        }
        slot.num_moved += static_cast<std::size_t>(result);
        proceed(slot);
        return false;
    }

    void finish(Slot& slot) {
        outcomes_[slot.job] = slot.error;
        if (slot.fd < 0) {
            return;
        }
        close(slot.fd);
        if (slot.error != 0) {
            unlinkat(config_.root_fd, writes_[slot.job].path, 0);
        }
    }

private:
    bool opened(Slot& slot, int result) {
        if (result == -EINVAL && slot.is_direct) {
            // No direct I/O here; the file may have been made all the same.
            unlinkat(config_.root_fd, writes_[slot.job].path, 0);
            slot.is_direct = false;
            operations_.open(slot, writes_[slot.job].path, O_WRONLY | O_CREAT | O_EXCL);
            return false;
        }
        if (result < 0) {
            slot.error = -result;
            return true;
        }
        slot.fd = result;
        proceed(slot);
        return false;
    }

    void proceed(Slot& slot) {
        if (slot.num_moved < num_bytes_) {
            operations_.write(slot, writes_[slot.job].from + slot.num_moved,
                              num_bytes_ - slot.num_moved, slot.num_moved);
            return;
        }
        slot.is_syncing = true;
        operations_.sync_data(slot);
    }

    Operations& operations_;
    std::span<const BlockWrite> writes_;
    std::size_t num_bytes_;
    const BlockIoConfig& config_;
    std::span<std::int32_t> outcomes_;
};

class UringBlockIo final : public BlockIo {
public:
    UringBlockIo(const BlockIoConfig& config, std::unique_ptr<Uring> ring)
        : config_(config),
          ring_(std::move(ring)),
          slots_(2 * config.queue_depth),
          headers_(aligned_memory(slots_.size() * page_bytes)) {
        for (std::size_t i = 0; i < slots_.size(); ++i) {
            slots_[i].number = i;
            slots_[i].header = headers_.get() + i * page_bytes;
        }
    }

    void read(std::span<const BlockRead> reads, std::size_t payload_bytes,
              std::span<std::int32_t> outcomes, std::byte* heads) override {
        // What the ring leaves unfinished where it fails itself.
        std::fill(outcomes.begin(), outcomes.end(), EIO);
        Operations operations(*ring_, registered_, config_.root_fd);
        Reader reader(operations, reads, payload_bytes, config_.is_direct, outcomes, heads);
        run_jobs(*ring_, slots_, reads.size(), reader);
    }

    void write(std::span<const BlockWrite> writes, std::size_t num_bytes,
               std::span<std::int32_t> outcomes) override {
        std::fill(outcomes.begin(), outcomes.end(), EIO);
        Operations operations(*ring_, registered_, config_.root_fd);
        Writer writer(operations, writes, num_bytes, config_, outcomes);
        run_jobs(*ring_, slots_, writes.size(), writer);
    }

    bool register_memory(std::span<const std::span<std::byte>> regions) override {
        std::vector<iovec> buffers{{headers_.get(), slots_.size() * page_bytes}};
        for (const auto region : regions) {
            for (std::size_t at = 0; at < region.size(); at += max_registered_bytes) {
                buffers.push_back(
                    {region.data() + at, std::min(max_registered_bytes, region.size() - at)});
            }
        }
        if (regions.empty() || ring_->register_buffers(buffers) != 0) {
            (void)ring_->register_buffers({});
            buffers.clear();
        }
        registered_.assign(std::move(buffers));
        return !regions.empty() && registered_.find(headers_.get(), page_bytes) == 0;
    }

private:
    BlockIoConfig config_;
    std::unique_ptr<Uring> ring_;
    Registered registered_;
    std::vector<Slot> slots_;
    AlignedMemory headers_;
};

}  // namespace

std::unique_ptr<BlockIo> make_uring_block_io(const BlockIoConfig& config) {
    auto ring = Uring::open(static_cast<unsigned>(config.queue_depth) * operations_per_file);
    return ring == nullptr ? nullptr : std::make_unique<UringBlockIo>(config, std::move(ring));
}

}  // namespace flowpath

#else

namespace flowpath {

std::unique_ptr<BlockIo> make_uring_block_io(const BlockIoConfig&) { return nullptr; }

}  // namespace flowpath

#endif
