// What every CUDA launcher needs: a device guard and checked calls.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace fastppo {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // an error of a launch stays behind and would be reported by somebody else's next call
  throw std::runtime_error(std::string("fastppo: ") + what + ": " + cudaGetErrorString(error));
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() { cudaSetDevice(previous_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

// A grid of blocks in one dimension, on the current device.
template <typename... Parameters, typename... Arguments>
void launch(const char* what, void (*kernel)(Parameters...), int64_t blocks, int threads, uint64_t stream,
            const Arguments&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), what);
}

}  // namespace fastppo
