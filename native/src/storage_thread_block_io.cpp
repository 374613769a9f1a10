#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "flowpath/storage/aligned_memory.hpp"
#include "flowpath/storage/block_io.hpp"

namespace flowpath {

namespace {

// What one thread needs of its own.
struct Desk {
    AlignedMemory header = aligned_memory(page_bytes);
    AlignedMemory staging;
    std::size_t staging_bytes = 0;

    std::byte* staged(std::size_t num_bytes) {
        if (staging_bytes < num_bytes) {
            staging = aligned_memory(num_bytes);
            staging_bytes = num_bytes;
        }
        return staging.get();
    }
};

// An open file that closes itself.
class File {
public:
    // Direct where the file system can.
    File(const BlockIoConfig& config, const char* path, int flags) : is_direct_(config.is_direct) {
        flags |= O_CLOEXEC | O_NOFOLLOW;
        fd_ = openat(config.root_fd, path, flags | (is_direct_ ? O_DIRECT : 0), 0640);
        if (fd_ < 0 && errno == EINVAL && is_direct_) {
            if ((flags & O_CREAT) != 0) {
                // It may have been made all the same.
                unlinkat(config.root_fd, path, 0);
            }
            is_direct_ = false;
            fd_ = openat(config.root_fd, path, flags, 0640);
        }
        error_ = fd_ < 0 ? errno : 0;
    }
    ~File() {
        if (fd_ >= 0) {
            close(fd_);
        }
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    [[nodiscard]] int fd() const noexcept { return fd_; }
    [[nodiscard]] int error() const noexcept { return error_; }
    [[nodiscard]] bool is_direct() const noexcept { return is_direct_; }

private:
    bool is_direct_;
    int fd_ = -1;
    int error_ = 0;
};

// Reads both parts in full; block_ok, block_truncated or an errno.
std::int32_t read_parts(int fd, std::byte* header, std::byte* into, std::size_t payload_bytes) {
    const std::size_t num_bytes = page_bytes + payload_bytes;
    std::size_t done = 0;
    while (done < num_bytes) {
        iovec parts[2] = {{header + std::min(done, page_bytes), page_bytes - std::min(done, page_bytes)},
                          {into, payload_bytes}};
        if (done > page_bytes) {
            parts[1] = {into + (done - page_bytes), num_bytes - done};
        }
        const bool has_header = done < page_bytes;
        const ssize_t count = preadv(fd, has_header ? parts : parts + 1, has_header ? 2 : 1,
                                     static_cast<off_t>(done));
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count < 0) {
            return errno;
        }
        done += static_cast<std::size_t>(count);
        // A file ends within a page only where it was cut: direct I/O cannot go on from there.
        if (count == 0 || (done < num_bytes && done % page_bytes != 0)) {
            return block_truncated;
        }
    }
    return block_ok;
}

std::int32_t read_file(const BlockIoConfig& config, const BlockRead& read,
                       std::size_t payload_bytes, std::byte* head, Desk& desk) {
    const File file(config, read.path, O_RDONLY);
    if (file.error() != 0) {
        return file.error();
    }
    const bool is_staged = file.is_direct() && !is_page_aligned(read.into);
    std::byte* const into = is_staged ? desk.staged(payload_bytes) : read.into;
    std::byte* const header = desk.header.get();
    if (const auto outcome = read_parts(file.fd(), header, into, payload_bytes);
        outcome != block_ok) {
        return outcome;
    }
    const std::span<const std::byte, page_bytes> page(header, page_bytes);
    const BlockOutcome outcome = verify_seal(page, {into, payload_bytes});
    if (outcome == block_ok) {
        std::memcpy(head, header, header_head_bytes);
        if (is_staged) {
            std::memcpy(read.into, into, payload_bytes);
        }
    }
    return outcome;
}

// Returns block_ok when all bytes are on the disk, or an errno.
std::int32_t write_synced(int fd, const std::byte* from, std::size_t num_bytes) {
    std::size_t done = 0;
    while (done < num_bytes) {
        const ssize_t count = pwrite(fd, from + done, num_bytes - done, static_cast<off_t>(done));
        if (count < 0 && errno != EINTR) {
            return errno;
        }
        if (count == 0) {
            return EIO;
        }
        done += count < 0 ? 0 : static_cast<std::size_t>(count);
    }
    return fdatasync(fd) == 0 ? block_ok : errno;
}

std::int32_t write_file(const BlockIoConfig& config, const BlockWrite& write,
                        std::size_t num_bytes) {
    const File file(config, write.path, O_WRONLY | O_CREAT | O_EXCL);
    if (file.error() != 0) {
        return file.error();
    }
    const std::int32_t outcome = write_synced(file.fd(), write.from, num_bytes);
    if (outcome != block_ok) {
        unlinkat(config.root_fd, write.path, 0);
    }
    return outcome;
}

// Threads that take items of one job at a time.
class Crew {
public:
    explicit Crew(std::size_t max_threads) : max_threads_(max_threads) {}
    ~Crew() {
        {
            const std::lock_guard lock(mutex_);
            is_closing_ = true;
        }
        has_work_.notify_all();
        for (std::thread& thread : threads_) {
            thread.join();
        }
    }
    Crew(const Crew&) = delete;
    Crew& operator=(const Crew&) = delete;

    // Calls work(context, item, desk) for items 0 .. num_items - 1 and returns after the last.
    void run(std::size_t num_items, void* context,
             void (*work)(void* context, std::size_t item, Desk& desk)) {
        std::unique_lock lock(mutex_);
        while (threads_.size() < std::min(max_threads_, num_items)) {
            threads_.emplace_back([this] { serve(); });
        }
        context_ = context;
        work_ = work;
        next_ = 0;
        num_items_ = num_items;
        num_left_ = num_items;
        has_work_.notify_all();
        is_done_.wait(lock, [this] { return num_left_ == 0; });
    }

private:
    void serve() {
        Desk desk;
        std::unique_lock lock(mutex_);
        while (true) {
            has_work_.wait(lock, [this] { return is_closing_ || next_ < num_items_; });
            if (is_closing_) {
                return;
            }
            const std::size_t item = next_++;
            lock.unlock();
            work_(context_, item, desk);
            lock.lock();
            if (--num_left_ == 0) {
                is_done_.notify_one();
            }
        }
    }

    std::size_t max_threads_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable has_work_, is_done_;
    bool is_closing_ = false;
    void* context_ = nullptr;
    void (*work_)(void*, std::size_t, Desk&) = nullptr;
    std::size_t next_ = 0;
    std::size_t num_items_ = 0;
    std::size_t num_left_ = 0;
};

class ThreadBlockIo final : public BlockIo {
public:
    explicit ThreadBlockIo(const BlockIoConfig& config)
        : config_(config), crew_(config.queue_depth) {}

    void read(std::span<const BlockRead> reads, std::size_t payload_bytes,
              std::span<std::int32_t> outcomes, std::byte* heads) override {
        run(reads.size(), [&](std::size_t item, Desk& desk) {
            outcomes[item] = read_file(config_, reads[item], payload_bytes,
                                       heads + item * header_head_bytes, desk);
        });
    }

    void write(std::span<const BlockWrite> writes, std::size_t num_bytes,
               std::span<std::int32_t> outcomes) override {
        run(writes.size(), [&](std::size_t item, Desk&) {
            outcomes[item] = write_file(config_, writes[item], num_bytes);
        });
    }

    bool register_memory(std::span<const std::span<std::byte>>) override { return false; }

private:
    template <typename Work>
    void run(std::size_t num_items, Work work) {
        if (num_items > 0) {
            crew_.run(num_items, &work, [](void* context, std::size_t item, Desk& desk) {
                (*static_cast<Work*>(context))(item, desk);
            });
        }
    }

    BlockIoConfig config_;
    Crew crew_;
};

}  // namespace

std::unique_ptr<BlockIo> make_thread_block_io(const BlockIoConfig& config) {
    return std::make_unique<ThreadBlockIo>(config);
}

}  // namespace flowpath
