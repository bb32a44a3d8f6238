// One small pool of threads for all CPU kernels.
#pragma once

#include <cstdint>
#include <functional>

namespace fastppo {

// Calls body(i) once for every i in [0, blocks), on the calling thread and up to num_threads - 1 others, and returns
// when all calls have returned. A block is the same work whichever thread takes it, so results do not depend on
// num_threads. Threads start when first needed. In a forked child the pool begins anew. A call made while another
// thread's call has the pool runs on its own thread. `body` must not throw.
void parallel_for(int64_t blocks, int num_threads, const std::function<void(int64_t)>& body);

}  // namespace fastppo
