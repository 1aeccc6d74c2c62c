// Kernels of the CUDA runtime: they are registered and counted, and refused where a device would refuse them
// (an empty grid, too many threads, too much shared memory), but never run.
#include "nullcuda.h"
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

static void *module[8];
static struct kernel {
  const void *host;
  const char *name;
} *kernels;  // registered while libraries are loaded
static size_t kernel_count, kernel_room;
static __thread struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} configuration;  // between the two calls that `kernel<<<...>>>` compiles to

// nvcc's registration of modules; declared in crt/host_runtime.h for its own output alone.
EXPORT void **__cudaRegisterFatBinary(void *binary) { return module; }
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT char __cudaInitModule(void **handle) { return 1; }
EXPORT void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int external, size_t bytes,
                              int constant, int global) {}
EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int threads,
                                   void *thread_id, void *block_id, void *block, void *grid, int *warp) {
  if (kernel_count == kernel_room) {
    kernel_room = kernel_room ? 2 * kernel_room : 4096;
    kernels = realloc(kernels, kernel_room * sizeof *kernels);
  }
  kernels[kernel_count++] = (struct kernel){host, name};
}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(cudaStream_t *)stream = configuration.stream;
  return cudaSuccess;
}

static const char *name_of(const void *kernel) {
  for (size_t i = 0; i < kernel_count; i++)
    if (kernels[i].host == kernel) return kernels[i].name;
  return "a kernel without a name";
}
static cudaError_t launch(const void *kernel, dim3 grid, dim3 block, size_t shared) {
  if (!nullcuda_launch("")) {
    nullcuda_refuse(name_of(kernel));
    return nullcuda_fail(cudaErrorNotSupported);
  }
  int is_empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
  int is_large = grid.y > 65535 || grid.z > 65535 || (long)block.x * block.y * block.z > 1024 || block.z > 64;
  if (is_empty || is_large || shared > nullcuda_device()->shared_bytes) return nullcuda_fail(cudaErrorInvalidConfiguration);
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                    cudaStream_t stream) {
  return launch(kernel, grid, block, shared);
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
  return launch(kernel, grid, block, shared);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                                               size_t shared, cudaStream_t stream) {
  return launch(kernel, grid, block, shared);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
  return launch(kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes);
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit,
                                       void **jit_values, unsigned jit_count, enum cudaLibraryOption *options,
                                       void **values, unsigned count) {
  *library = (cudaLibrary_t)nullcuda_handle;
  return cudaSuccess;
}
EXPORT cudaError_t cudaLibraryUnload(cudaLibrary_t library) { return cudaSuccess; }
EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
  *kernel = (cudaKernel_t)nullcuda_handle;
  return cudaSuccess;
}
EXPORT cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value,
                                                   int device) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = nullcuda_device()->capability;
  attributes->maxDynamicSharedSizeBytes = (int)nullcuda_device()->shared_bytes;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > (int)nullcuda_device()->shared_bytes)
    return nullcuda_fail(cudaErrorInvalidValue);
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                          size_t shared, unsigned flags) {
  *blocks = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads,
                                                                 size_t shared) {
  *blocks = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *kernel, const cudaLaunchConfig_t *config) {
  *clusters = nullcuda_device()->multiprocessors / 2;
  return cudaSuccess;
}
