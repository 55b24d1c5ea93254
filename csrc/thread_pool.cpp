#include "thread_pool.h"

#include <cfenv>
#include <chrono>
#include <new>
#include <stdexcept>

namespace octavo {
namespace {

constexpr uint64_t kOpen = 1ull << 32;
constexpr uint64_t kInside = kOpen - 1;
constexpr int kIdleSpins = 4000;   // about 50 us, then sleep: an idle server uses no CPU
constexpr int kPhaseSpins = 2000;  // then yield: whoever holds the chunk may be waiting for this core
constexpr int kYields = 100;       // then nap

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Ready>
void wait_until(Ready ready) {
  for (int i = 0; !ready(); i++) {
    if (i < kPhaseSpins)
      pause();
    else if (i < kPhaseSpins + kYields)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace

ThreadPool::ThreadPool(int threads, size_t scratch_bytes) : scratch_bytes_(0) {
  if (threads < 1) throw std::invalid_argument("a thread pool has at least one thread");
  scratch_.resize(threads);
  grow_scratch(scratch_bytes);
  try {
    for (int i = 1; i < threads; i++) threads_.emplace_back([this, i] { work(i); });
  } catch (...) {  // the system has no more threads
    end_threads();
    throw;
  }
}

ThreadPool::~ThreadPool() { end_threads(); }

void ThreadPool::end_threads() {
  stop_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  for (auto &t : threads_) t.join();
}

void ThreadPool::grow_scratch(size_t bytes) {
  if (bytes <= scratch_bytes_) return;
  wait_until([&] { return (door_.load() & kInside) == 0; });
  bytes = (bytes + 63) / 64 * 64;
  for (auto &s : scratch_) {
    auto *p = static_cast<std::byte *>(std::aligned_alloc(64, bytes));
    if (!p) throw std::bad_alloc();
    s.reset(p);
  }
  scratch_bytes_ = bytes;
}

void ThreadPool::run(const Phase *phases, int count, const void *context) {
  wait_until([&] { return (door_.load(std::memory_order_acquire) & kInside) == 0; });
  if (count > capacity_) {
    progress_ = std::make_unique<Progress[]>(count);
    capacity_ = count;
  }
  for (int i = 0; i < count; i++) {
    progress_[i].phase = phases[i];
    progress_[i].next.store(0, std::memory_order_relaxed);
    progress_[i].done.store(0, std::memory_order_relaxed);
  }
  count_ = count;
  context_ = context;
  uint64_t generation = (generation_.load() + 1) & 0x7fffffff;
  door_.store(generation << 33 | kOpen, std::memory_order_release);
  generation_.store(static_cast<uint32_t>(generation), std::memory_order_release);
  if (!threads_.empty()) generation_.notify_all();
  take_part(0);
  door_.fetch_and(~kOpen, std::memory_order_acq_rel);
}

void ThreadPool::take_part(int thread) {
  void *scratch = scratch_[thread].get();
  // Some library may have switched denormals off in the caller's thread, or in the one that made the workers.
  std::fenv_t callers;
  std::fegetenv(&callers);
  std::fesetenv(FE_DFL_ENV);
  for (int i = 0; i < count_; i++) {
    Progress &progress = progress_[i];
    const Phase &phase = progress.phase;
    int chunk;
    while ((chunk = progress.next.fetch_add(1, std::memory_order_relaxed)) < phase.chunks) {
      phase.run(phase.op, context_, chunk, scratch);
      progress.done.fetch_add(1, std::memory_order_release);
    }
    wait_until([&] { return progress.done.load(std::memory_order_acquire) == phase.chunks; });
  }
  std::fesetenv(&callers);
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  while (true) {
    for (int i = 0; i < kIdleSpins && generation_.load(std::memory_order_acquire) == seen; i++) pause();
    generation_.wait(seen, std::memory_order_acquire);
    if (stop_) return;
    seen = generation_.load(std::memory_order_acquire);
    uint64_t door = door_.load(std::memory_order_acquire);
    bool entered = false;
    while ((door & kOpen) && !entered) entered = door_.compare_exchange_weak(door, door + 1, std::memory_order_acq_rel);
    if (!entered) continue;
    take_part(thread);
    door_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace octavo
