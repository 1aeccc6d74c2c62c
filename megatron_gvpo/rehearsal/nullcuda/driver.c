// The CUDA driver's functions that PyTorch, Triton and Transformer Engine call. stubs.c has the rest of cuda.h.
#define _GNU_SOURCE
#include "nullcuda.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

EXPORT CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetCount(int *count) { return (CUresult)cudaGetDeviceCount(count); }
EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  if (ordinal < 0 || ordinal >= nullcuda_device()->count) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  strncpy(name, nullcuda_device()->name, (size_t)length - 1);
  return CUDA_SUCCESS;
}
// The driver numbers attributes as the runtime does.
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}
EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
  *bytes = nullcuda_device()->bytes;
  return CUDA_SUCCESS;
}

// One context a device, always current.
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)nullcuda_handle;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)nullcuda_handle;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  if (context) *context = (CUcontext)nullcuda_handle;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetDevice(CUdevice *device) { return (CUresult)cudaGetDevice(device); }
EXPORT CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext context) { return cuCtxGetDevice(device); }
EXPORT CUresult cuCtxSynchronize(void) { return (CUresult)cudaDeviceSynchronize(); }
EXPORT CUresult cuCtxSynchronize_v2(CUcontext context) { return cuCtxSynchronize(); }
EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) { return cuCtxGetCurrent(context); }
EXPORT CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext *context, CUgreenCtx *green) {
  return cuCtxGetCurrent(context);  // a caller of the first version passes no third argument
}
EXPORT CUresult cuStreamSynchronize(CUstream stream) { return (CUresult)cudaStreamSynchronize(stream); }

// Modules, by which Triton loads its kernels.
EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)nullcuda_handle;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoad(CUmodule *module, const char *file) { return cuModuleLoadData(module, file); }
EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options,
                                   void **values) {
  return cuModuleLoadData(module, image);
}
EXPORT CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)nullcuda_handle;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value > (int)nullcuda_device()->shared_bytes)
    return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads,
                                                            size_t shared) {
  *blocks = 2;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int threads,
                                                                     size_t shared, unsigned flags) {
  *blocks = 2;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  *clusters = nullcuda_device()->multiprocessors / 2;
  return CUDA_SUCCESS;
}

static CUresult launch(unsigned x, unsigned y, unsigned z, unsigned threads, unsigned shared) {
  if (!nullcuda_launch("a kernel of Triton")) return CUDA_ERROR_NOT_SUPPORTED;
  int fits = x && y && z && y <= 65535 && z <= 65535 && threads && threads <= 1024;
  return fits && shared <= nullcuda_device()->shared_bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                               void **extra) {
  return launch(grid_x, grid_y, grid_z, block_x * block_y * block_z, shared);
}
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                          CUstream stream, void **arguments) {
  return launch(grid_x, grid_y, grid_z, block_x * block_y * block_z, shared);
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **arguments, void **extra) {
  return launch(c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX * c->blockDimY * c->blockDimZ, c->sharedMemBytes);
}
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                       const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                       const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                       CUtensorMapFloatOOBfill fill) {
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  struct cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, (void *)address);
  if (attributes.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;  // pageable host memory
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr *)value = address;
  else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *(unsigned *)value = attributes.type == cudaMemoryTypeHost ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    *(int *)value = attributes.device;
  else
    *(int *)value = 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = cudaGetErrorString((cudaError_t)error);  // the driver's numbers are the runtime's, where both have one
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult error, const char **text) {
  *text = cudaGetErrorName((cudaError_t)error);
  return CUDA_SUCCESS;
}

// Functions are looked up by name, without the suffix of their newest version.
static void *newest(const char *name) {
  char versioned[256];
  for (char suffix = '4'; suffix >= '2'; suffix--) {
    snprintf(versioned, sizeof versioned, "%s_v%c", name, suffix);
    void *function = dlsym(RTLD_DEFAULT, versioned);
    if (function) return function;
  }
  void *function = dlsym(RTLD_DEFAULT, name);
  if (!function) nullcuda_refuse(name);
  return function;
}
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *result) {
  *function = newest(name);
  if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *result) {
  *function = newest(name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
