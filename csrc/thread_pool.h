// A persistent pool that runs a list of phases: parallel loops, one after the other, in one parallel region.
//
// Chunks of a phase are claimed dynamically, and a phase is over when its chunks are done, not when all threads have
// arrived: a thread that lost its core to another process and holds no chunk delays nobody, neither in its region nor in
// the next few, which have places of their own.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

namespace octavo {

struct Phase {
  void (*run)(const void *op, const void *context, int chunk, void *scratch);
  const void *op;
  int chunks;
};

class ThreadPool {
 public:
  // `threads` counts the caller. Each gets `scratch_bytes` of private memory. `pulse`, if given, counts what the caller's
  // thread gets done while it runs phases, for whoever watches from another process: it stands still if any chunk hangs.
  // Throws std::system_error, std::bad_alloc.
  ThreadPool(int threads, size_t scratch_bytes, std::atomic<uint64_t> *pulse = nullptr);
  ~ThreadPool();
  ThreadPool(const ThreadPool &) = delete;
  ThreadPool &operator=(const ThreadPool &) = delete;

  int size() const { return static_cast<int>(scratch_.size()); }
  void grow_scratch(size_t bytes);
  // Runs all phases with the caller taking part; returns when the last is done. One caller at a time.
  void run(const Phase *phases, int count, const void *context);

 private:
  struct alignas(64) Progress {
    Phase phase;  // a copy: a late worker still looks at it when the caller has gone on
    std::atomic<int> next{0}, done{0};
  };
  struct alignas(64) Region {
    int count = 0;
    const void *context = nullptr;
    std::unique_ptr<Progress[]> progress;
    int capacity = 0;
    // A worker enters only through the open door, by compare-and-swap, so that the caller can set up the region anew once
    // nobody is inside: [open : 1][inside : 32].
    std::atomic<uint64_t> door{0};
    void wait_until_empty() const;
  };
  static constexpr int kRegions = 4;
  void end_threads();
  void work(int thread);
  void take_part(const Region &region, int thread);
  // Only the caller's thread counts, so it shares the place with no other writer.
  void beat() { pulse_->store(pulse_->load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }

  struct Free {
    void operator()(std::byte *p) const { std::free(p); }
  };
  std::vector<std::unique_ptr<std::byte, Free>> scratch_;  // 64-byte aligned
  size_t scratch_bytes_;
  std::vector<std::thread> threads_;

  Region regions_[kRegions];             // used in turn
  std::atomic<uint32_t> generation_{0};  // of the region that was opened last, regions_[generation % kRegions]
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> unwatched_{0};
  std::atomic<uint64_t> *pulse_;
};

}  // namespace octavo
