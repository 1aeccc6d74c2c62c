// Device memory that processes share (CUDA IPC). An allocation whose handle somebody asks for becomes a file in memory,
// at the same address; another process opens the file and maps it. What one writes the other sees, as on a GPU.
#define _GNU_SOURCE
#include "nullcuda.h"
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
  void *start;
  int file;
  unsigned number;  // distinguishes allocations that had the same file one after the other
} Shared;
typedef struct {  // what a cudaIpcMemHandle_t has
  int process, file;
  unsigned number;
  size_t bytes;
} Handle;
_Static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t), "a handle has room");

static Shared *shared;
static size_t count;
static unsigned last_number;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Shared *find(void *start) {
  for (size_t i = 0; i < count; i++)
    if (shared[i].start == start) return &shared[i];
  return NULL;
}

// Puts a file with the allocation's bytes in its place. Returns NULL where it cannot. The caller has the lock.
static Shared *share(void *start, size_t bytes) {
  int file = memfd_create("nullcuda", MFD_CLOEXEC);
  Shared *more = realloc(shared, (count + 1) * sizeof *shared);
  if (more) shared = more;
  void *copy = file < 0 || ftruncate(file, (off_t)bytes)
                   ? MAP_FAILED
                   : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (!more || copy == MAP_FAILED) {
    if (file >= 0) close(file);
    return NULL;
  }
  memcpy(copy, start, bytes);
  munmap(copy, bytes);
  if (mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) abort();
  shared[count] = (Shared){start, file, ++last_number};
  return &shared[count++];
}

void nullcuda_unshare(void *start) {
  pthread_mutex_lock(&lock);
  Shared *one = find(start);
  if (one) {
    close(one->file);
    *one = shared[--count];
  }
  pthread_mutex_unlock(&lock);
}

EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *address) {
  size_t bytes = nullcuda_block(&address);
  if (!bytes) return nullcuda_fail(cudaErrorInvalidValue);
  pthread_mutex_lock(&lock);
  Shared *one = find(address);
  if (!one) one = share(address, bytes);
  Handle handle = one ? (Handle){getpid(), one->file, one->number, bytes} : (Handle){0};
  pthread_mutex_unlock(&lock);
  if (!one) return nullcuda_fail(cudaErrorMemoryAllocation);
  memset(out, 0, sizeof *out);
  memcpy(out, &handle, sizeof handle);
  return cudaSuccess;
}
EXPORT cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t in, unsigned flags) {
  Handle handle;
  char path[64];
  *out = NULL;
  memcpy(&handle, &in, sizeof handle);
  // As on a GPU: a process cannot open its own memory, nor that of one that has ended.
  if (handle.process == getpid()) return nullcuda_fail(cudaErrorDeviceUninitialized);
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.file);
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return nullcuda_fail(cudaErrorInvalidResourceHandle);
  void *start = mmap(NULL, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (start == MAP_FAILED || !nullcuda_add(start, handle.bytes)) return nullcuda_fail(cudaErrorMapBufferObjectFailed);
  *out = start;
  return cudaSuccess;
}
EXPORT cudaError_t cudaIpcCloseMemHandle(void *address) { return cudaFree(address); }

// Everything is done at once, so there is nothing to wait for.
EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *out, cudaEvent_t event) {
  memset(out, 0, sizeof *out);
  return cudaSuccess;
}
EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) {
  return cudaEventCreate(event);
}
