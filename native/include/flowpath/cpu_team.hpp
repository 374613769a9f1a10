// Runs independent work items on the threads of the process's one OpenMP runtime.
#pragma once

#include <atomic>
#include <cstdint>

namespace flowpath::cpu {

// torch brings its own OpenMP runtime, whose idle threads spin for a while after every operation.
// A pool of our own would fight them for the cores, and a runtime that we linked would be a second
// one; so the runtime that is loaded already is looked up by name, and without one all work runs on
// the calling thread. Items are claimed one by one, so uneven items balance by themselves.
class Team {
public:
    explicit Team(int num_threads);

    [[nodiscard]] int num_threads() const noexcept { return num_threads_; }

    // Calls work(item, thread) for every item in 0 .. num_items - 1, thread in 0 .. num_threads - 1.
    // The work must not throw.
    template <typename Work>
    void run(std::int64_t num_items, const Work& work) const {
        if (num_threads_ == 1 || num_items < 2) {
            for (std::int64_t item = 0; item < num_items; ++item) {
                work(item, 0);
            }
            return;
        }
        Shared<Work> shared{work, num_items, {0}, {0}};
        parallel_(&Shared<Work>::enter, &shared, static_cast<unsigned>(num_threads_), 0);
    }

private:
    using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

    template <typename Work>
    struct Shared {
        const Work& work;
        std::int64_t num_items;
        std::atomic<std::int64_t> next_item;
        std::atomic<int> next_thread;

        static void enter(void* memory) {
            auto& shared = *static_cast<Shared*>(memory);
            const int thread = shared.next_thread.fetch_add(1, std::memory_order_relaxed);
            for (;;) {
                const std::int64_t item =
                    shared.next_item.fetch_add(1, std::memory_order_relaxed);
                if (item >= shared.num_items) {
                    return;
                }
                shared.work(item, thread);
            }
        }
    };

    int num_threads_;
    Parallel parallel_;
};

}  // namespace flowpath::cpu
