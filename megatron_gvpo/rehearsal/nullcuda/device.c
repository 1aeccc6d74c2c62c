// The device: its properties, the versions of driver and runtime, and the names of errors.
#include "nullcuda.h"
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#define VERSION CUDART_VERSION  // of the headers, which are those of the installed libraries

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
  *count = nullcuda_device()->count;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int *version) {
  *version = VERSION;
  return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = VERSION;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  const struct device *d = nullcuda_device();
  if (device < 0 || device >= d->count) return nullcuda_fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  strncpy(p->name, d->name, sizeof p->name - 1);
  p->uuid.bytes[0] = (char)(device + 1);
  p->pciBusID = device + 1;
  p->totalGlobalMem = d->bytes;
  p->major = d->capability / 10;
  p->minor = d->capability % 10;
  p->multiProcessorCount = d->multiprocessors;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = d->shared_bytes;
  p->sharedMemPerMultiprocessor = d->shared_bytes + 1024;
  p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->l2CacheSize = 50 << 20;
  p->memoryBusWidth = 5120;
  p->memPitch = 2147483647;
  p->textureAlignment = 512;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = p->concurrentKernels = p->managedMemory = p->cooperativeLaunch = 1;
  p->streamPrioritiesSupported = p->canMapHostMemory = p->memoryPoolsSupported = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp p;
  if (cudaGetDeviceProperties(&p, device)) return cudaErrorInvalidDevice;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = p.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = (int)p.reservedSharedMemPerBlock; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    default: *value = 1;  // most of the others ask for a feature
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
  snprintf(text, (size_t)length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceReset(void) { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

EXPORT cudaError_t cudaGetLastError(void) {
  cudaError_t error = nullcuda_last_error;
  nullcuda_last_error = cudaSuccess;
  return error;
}
EXPORT cudaError_t cudaPeekAtLastError(void) { return nullcuda_last_error; }
EXPORT const char *cudaGetErrorString(cudaError_t error) {
  static __thread char text[1000];
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorNotSupported:
      snprintf(text, sizeof text, "operation not supported by the null CUDA: %.900s", nullcuda_refused());
      return text;
    default: return "error of the null CUDA";
  }
}
EXPORT const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}
