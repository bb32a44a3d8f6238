#include "common/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace fastppo {
namespace {

// How often a thread looks again before it sleeps: 50 to 150 us. Waking a sleeping one takes as long, and the next
// call, or the end of this one, is often nearer. Longer would take the core from torch's own threads.
constexpr int kLooks = 3000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Pool {
 public:
  void run(int64_t blocks, int num_threads, const std::function<void(int64_t)>& body) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner.owns_lock()) {
      for (int64_t i = 0; i < blocks; ++i) body(i);
      return;
    }
    start_workers(num_threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = &body;
      blocks_ = blocks;
      next_.store(0, std::memory_order_relaxed);
      seats_ = num_threads - 1;
      call_.fetch_add(1);
    }
    wake_.notify_all();
    take_blocks(body, blocks);
    std::unique_lock<std::mutex> lock(mutex_);
    seats_ = 0;
    lock.unlock();
    for (int look = 0; look < kLooks && working_.load() != 0; ++look) pause();
    lock.lock();
    done_.wait(lock, [this] { return working_ == 0; });
  }

 private:
  void start_workers(int wanted) {
    while (workers_ < wanted) {
      try {
        std::thread([this] { work(); }).detach();
      } catch (const std::system_error&) {
        return;  // the process is at its limit of threads: those that run share the work
      }
      ++workers_;
    }
  }

  void work() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      lock.unlock();
      for (int look = 0; look < kLooks && call_.load() == seen; ++look) pause();
      lock.lock();
      wake_.wait(lock, [&] { return seats_ > 0 && call_ != seen; });
      seen = call_;
      --seats_;
      ++working_;
      const std::function<void(int64_t)>& body = *body_;
      const int64_t blocks = blocks_;
      lock.unlock();
      take_blocks(body, blocks);
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  void take_blocks(const std::function<void(int64_t)>& body, int64_t blocks) {
    for (int64_t i = next_.fetch_add(1); i < blocks; i = next_.fetch_add(1)) body(i);
  }

  std::mutex owner_;  // held by the one caller whose call the workers serve
  int workers_ = 0;   // guarded by owner_

  std::mutex mutex_;  // guards every change of what follows; the atomics are looked at without it too
  std::condition_variable wake_;
  std::condition_variable done_;
  const std::function<void(int64_t)>* body_ = nullptr;
  int64_t blocks_ = 0;
  std::atomic<uint64_t> call_{0};
  int seats_ = 0;                // workers that may still join the current call
  std::atomic<int> working_{0};  // workers inside it
  std::atomic<int64_t> next_{0};
};

// Never destroyed: its detached threads may wait on it until the process ends.
std::atomic<Pool*> current{nullptr};

// The parent's threads do not exist in a forked child and its mutexes may be locked there for ever.
void forget_pool() {
  current.store(nullptr);
}

Pool& pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  static_cast<void>(registered);
  Pool* found = current.load();
  if (found == nullptr) {
    Pool* fresh = new Pool;
    if (current.compare_exchange_strong(found, fresh)) return *fresh;
    delete fresh;
  }
  return *found;
}

}  // namespace

void parallel_for(int64_t blocks, int num_threads, const std::function<void(int64_t)>& body) {
  const int threads = static_cast<int>(std::min<int64_t>(num_threads, blocks));
  if (threads <= 1) {
    for (int64_t i = 0; i < blocks; ++i) body(i);
    return;
  }
  pool().run(blocks, threads, body);
}

}  // namespace fastppo
