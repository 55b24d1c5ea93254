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

ThreadPool::ThreadPool(int threads, size_t scratch_bytes, std::atomic<uint64_t> *pulse)
    : scratch_bytes_(0), pulse_(pulse ? pulse : &unwatched_) {
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
  for (Region &region : regions_) region.wait_until_empty();
  bytes = (bytes + 63) / 64 * 64;
  for (auto &s : scratch_) {
    auto *p = static_cast<std::byte *>(std::aligned_alloc(64, bytes));
    if (!p) throw std::bad_alloc();
    s.reset(p);
  }
  scratch_bytes_ = bytes;
}

void ThreadPool::Region::wait_until_empty() const {
  wait_until([this] { return (door.load(std::memory_order_acquire) & kInside) == 0; });
}

void ThreadPool::run(const Phase *phases, int count, const void *context) {
  uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
  Region &region = regions_[generation % kRegions];
  region.wait_until_empty();
  if (count > region.capacity) {
    region.progress = std::make_unique<Progress[]>(count);
    region.capacity = count;
  }
  for (int i = 0; i < count; i++) {
    region.progress[i].phase = phases[i];
    region.progress[i].next.store(0, std::memory_order_relaxed);
    region.progress[i].done.store(0, std::memory_order_relaxed);
  }
  region.count = count;
  region.context = context;
  region.door.store(kOpen, std::memory_order_release);
  generation_.store(generation, std::memory_order_release);
  if (!threads_.empty()) generation_.notify_all();
  take_part(region, 0);
  region.door.fetch_and(~kOpen, std::memory_order_acq_rel);
}

void ThreadPool::take_part(const Region &region, int thread) {
  void *scratch = scratch_[thread].get();
  // Some library may have switched denormals off in the caller's thread, or in the one that made the workers.
  std::fenv_t callers;
  std::fegetenv(&callers);
  std::fesetenv(FE_DFL_ENV);
  for (int i = 0; i < region.count; i++) {
    Progress &progress = region.progress[i];
    const Phase &phase = progress.phase;
    int chunk;
    while ((chunk = progress.next.fetch_add(1, std::memory_order_relaxed)) < phase.chunks) {
      phase.run(phase.op, region.context, chunk, scratch);
      progress.done.fetch_add(1, std::memory_order_release);
      if (thread == 0) beat();
    }
    wait_until([&] { return progress.done.load(std::memory_order_acquire) == phase.chunks; });
    if (thread == 0) beat();
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
    Region &region = regions_[seen % kRegions];
    uint64_t door = region.door.load(std::memory_order_acquire);
    bool entered = false;
    while ((door & kOpen) && !entered) entered = region.door.compare_exchange_weak(door, door + 1, std::memory_order_acq_rel);
    if (!entered) continue;
    take_part(region, thread);
    region.door.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace octavo
