// A persistent pool that runs a list of phases: parallel loops, one after the other, in one parallel region.
//
// Chunks of a phase are claimed dynamically, and a phase is over when its chunks are done, not when all threads have
// arrived: a thread that lost its core to another process and holds no chunk delays nobody.
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
  // `threads` counts the caller. Each gets `scratch_bytes` of private memory. Throws std::system_error, std::bad_alloc.
  ThreadPool(int threads, size_t scratch_bytes);
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
  void end_threads();
  void work(int thread);
  void take_part(int thread);

  struct Free {
    void operator()(std::byte *p) const { std::free(p); }
  };
  std::vector<std::unique_ptr<std::byte, Free>> scratch_;  // 64-byte aligned
  size_t scratch_bytes_;
  std::vector<std::thread> threads_;

  int count_ = 0;
  const void *context_ = nullptr;
  std::unique_ptr<Progress[]> progress_;
  int capacity_ = 0;

  // A worker enters a region only through the open door, by compare-and-swap, so that the caller can set up the next
  // region once nobody is inside: [generation : 31][open : 1][inside : 32].
  std::atomic<uint64_t> door_{0};
  std::atomic<uint32_t> generation_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace octavo
