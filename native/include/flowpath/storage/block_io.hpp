// Reads and writes many block files at a time (see sealed_file.hpp), with a bounded number of them
// in flight. Two engines: io_uring, and a pool of threads where the system forbids io_uring.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "flowpath/storage/sealed_file.hpp"

namespace flowpath {

inline constexpr std::size_t max_queue_depth = 1024;

// What every file of one engine has in common.
struct BlockIoConfig {
    int root_fd;              // the folder that paths are relative to; stays open, not owned
    std::size_t queue_depth;  // files in flight, 1 .. max_queue_depth
    bool is_direct;           // past the page cache, where the file system can
};

struct BlockRead {
    const char* path;
    std::byte* into;  // payload_bytes of room; what a failed read leaves there is undefined
};

struct BlockWrite {
    const char* path;       // must not exist
    const std::byte* from;  // header and payload in one piece, aligned to pages
};

// The part of a header that a read hands out.
inline constexpr std::size_t header_head_bytes = 256;

// One engine. Calls may come from any thread, one after the other; each returns when nothing of it
// is in flight any more. Paths are short and in ASCII.
class BlockIo {
public:
    virtual ~BlockIo() = default;

    // Reads and verifies; `outcomes` and `heads` (header_head_bytes each) in the order of `reads`.
    // A head is undefined where the outcome is not block_ok. `payload_bytes`: whole pages.
    virtual void read(std::span<const BlockRead> reads, std::size_t payload_bytes,
                      std::span<std::int32_t> outcomes, std::byte* heads) = 0;

    // Creates files of `num_bytes` (whole pages); block_ok says that the bytes are on the disk. A
    // file that failed is removed again.
    virtual void write(std::span<const BlockWrite> writes, std::size_t num_bytes,
                       std::span<std::int32_t> outcomes) = 0;

    // Tells the system of memory that reads and writes will often use, in place of what was told
    // before. False where that is not possible: then everything works as without it.
    virtual bool register_memory(std::span<const std::span<std::byte>> regions) = 0;
};

// Null where this system has or allows no io_uring.
[[nodiscard]] std::unique_ptr<BlockIo> make_uring_block_io(const BlockIoConfig& config);

// Starts its threads when it is first used.
[[nodiscard]] std::unique_ptr<BlockIo> make_thread_block_io(const BlockIoConfig& config);

}  // namespace flowpath
