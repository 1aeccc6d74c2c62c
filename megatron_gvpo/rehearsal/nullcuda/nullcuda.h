// The parts that the files of the null CUDA share: settings, counters and the one opaque handle.
#pragma once
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EXPORT __attribute__((visibility("default")))

// Counters of this process, in the order in which nullcuda_counter_name names them.
enum counter {
  KERNEL_LAUNCHES,     // of the runtime, the driver (Triton) and cuBLAS
  HOST_WAITS,          // the host waits for a stream, an event or the device
  COPIES_TO_DEVICE,    // from the host
  BYTES_TO_DEVICE,
  COPIES_TO_HOST,      // from the device
  BYTES_TO_HOST,
  COPIES_ON_DEVICE,
  BYTES_ON_DEVICE,
  MATRIX_PRODUCTS,     // calls of cuBLAS's and cuBLASLt's products
  MATRIX_FLOPS,        // 2 m n k of each, in every precision
  MATRIX_FLOPS_FP8,    // of these, those with FP8 inputs
  FAILED_RESERVATIONS, // address space that the host refused: not the device's lack of memory
  COUNTERS
};
void nullcuda_count(enum counter counter, long amount);

// The device that NULLCUDA_* variables describe; read once.
struct device {
  int count;               // NULLCUDA_DEVICES
  size_t bytes;            // NULLCUDA_BYTES: what cudaMalloc can give, in all
  int capability;          // NULLCUDA_CAPABILITY: 90 is sm_90
  int multiprocessors;     // NULLCUDA_SMS
  size_t shared_bytes;     // NULLCUDA_SHARED_BYTES: shared memory of a block, opted in
  const char *name;        // NULLCUDA_NAME
  size_t copied_bytes;     // NULLCUDA_COPY: larger copies are not made
  int refuses_kernels;     // NULLCUDA_KERNELS=refuse: only threads that nullcuda_permit has permitted launch any
};
const struct device *nullcuda_device(void);

// An address that handles of libraries, contexts, modules and kernels may point to. Nobody reads it.
extern char nullcuda_handle[4096];

// The error that cudaGetLastError returns, of this thread. nullcuda_fail keeps an error and returns it.
extern __thread int nullcuda_last_error;
int nullcuda_fail(int error);

// Returns 801 (not supported) and keeps the function's name for nullcuda_refused.
int nullcuda_refuse(const char *function);
EXPORT const char *nullcuda_refused(void);

// Counts a launch. Returns 0, and keeps the kernel's name for nullcuda_refused, where this thread may not launch it.
int nullcuda_launch(const char *kernel);

// The allocation of device memory around an address: sets the address to its start, and returns its bytes; 0 for none.
size_t nullcuda_block(void **address);
// Notes memory of another process that is mapped here. Returns 0 where it cannot.
int nullcuda_add(void *start, size_t bytes);
// Called before an allocation is freed.
void nullcuda_unshare(void *start);

#ifdef __cplusplus
}
#endif
