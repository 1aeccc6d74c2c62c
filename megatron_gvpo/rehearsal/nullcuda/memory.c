// Memory of the CUDA runtime. An allocation is reserved address space of this process: it costs no memory until
// somebody writes to it, and device and host addresses are the same. Copies up to NULLCUDA_COPY bytes are made;
// larger ones, which would fill the reserved pages, are counted and left out.
#define _GNU_SOURCE
#include "nullcuda.h"
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DEVICES 64
#define PAGE 4096

typedef struct {
  char *start;
  size_t bytes;
  int device;   // current when it was made
  int on_host;  // pinned host memory
  int is_mapped;  // another process has allocated it
} Block;

static Block *blocks;  // sorted by address
static size_t block_count, block_room;
static size_t used[DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static __thread int current;

EXPORT cudaError_t cudaGetDevice(int *device) {
  *device = current;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= nullcuda_device()->count) return nullcuda_fail(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}

// Returns the index of the first block that begins after `address`.
static size_t index_after(const char *address) {
  size_t low = 0, high = block_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (blocks[middle].start <= address)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}
static Block *find(const void *address) {
  size_t index = index_after(address);
  if (!index) return NULL;
  Block *block = &blocks[index - 1];
  return (const char *)address < block->start + block->bytes ? block : NULL;
}
static int kind_of(const void *address) {  // cudaMemoryType
  pthread_mutex_lock(&lock);
  Block *block = find(address);
  int kind = !block ? cudaMemoryTypeUnregistered : block->on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  pthread_mutex_unlock(&lock);
  return kind;
}

// Adds a block; returns 0 if there is no room to note it. The caller has the lock.
static int insert(Block block) {
  if (block_count == block_room) {
    block_room = block_room ? 2 * block_room : 256;
    blocks = realloc(blocks, block_room * sizeof *blocks);
  }
  if (!blocks) return 0;
  size_t index = index_after(block.start);
  memmove(blocks + index + 1, blocks + index, (block_count++ - index) * sizeof *blocks);
  blocks[index] = block;
  return 1;
}

static cudaError_t reserve(void **out, size_t bytes, int on_host) {
  size_t size = bytes ? (bytes + PAGE - 1) & ~(size_t)(PAGE - 1) : PAGE;
  *out = NULL;
  pthread_mutex_lock(&lock);
  if (!on_host && used[current] + size > nullcuda_device()->bytes) {
    pthread_mutex_unlock(&lock);
    return nullcuda_fail(cudaErrorMemoryAllocation);
  }
  char *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED || !insert((Block){start, size, current, on_host, 0})) {
    pthread_mutex_unlock(&lock);
    nullcuda_count(FAILED_RESERVATIONS, 1);
    return nullcuda_fail(cudaErrorMemoryAllocation);
  }
  if (!on_host) used[current] += size;
  pthread_mutex_unlock(&lock);
  *out = start;
  return cudaSuccess;
}
static cudaError_t release(void *address) {
  if (!address) return cudaSuccess;
  pthread_mutex_lock(&lock);
  Block *block = find(address);
  int is_start = block && block->start == address;
  if (is_start) {
    nullcuda_unshare(block->start);
    munmap(block->start, block->bytes);
    if (!block->on_host && !block->is_mapped) used[block->device] -= block->bytes;
    memmove(block, block + 1, (--block_count - (size_t)(block - blocks)) * sizeof *block);
  }
  pthread_mutex_unlock(&lock);
  return is_start ? cudaSuccess : nullcuda_fail(cudaErrorInvalidValue);
}

size_t nullcuda_block(void **address) {
  pthread_mutex_lock(&lock);
  Block *block = find(*address);
  size_t bytes = block && !block->on_host ? block->bytes : 0;
  if (bytes) *address = block->start;
  pthread_mutex_unlock(&lock);
  return bytes;
}
int nullcuda_add(void *start, size_t bytes) {
  pthread_mutex_lock(&lock);
  int is_added = insert((Block){start, bytes, current, 0, 1});
  pthread_mutex_unlock(&lock);
  return is_added;
}

EXPORT cudaError_t cudaMalloc(void **out, size_t bytes) { return reserve(out, bytes, 0); }
EXPORT cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) { return reserve(out, bytes, 0); }
EXPORT cudaError_t cudaFree(void *address) { return release(address); }
EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return release(address); }
EXPORT cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) { return reserve(out, bytes, 1); }
EXPORT cudaError_t cudaMallocHost(void **out, size_t bytes) { return reserve(out, bytes, 1); }
EXPORT cudaError_t cudaFreeHost(void *address) { return release(address); }
EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *total = nullcuda_device()->bytes;
  *free_bytes = *total - used[current];
  return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  memset(attributes, 0, sizeof *attributes);
  pthread_mutex_lock(&lock);
  Block *block = find(address);
  attributes->type = !block          ? cudaMemoryTypeUnregistered
                     : block->on_host ? cudaMemoryTypeHost
                                      : cudaMemoryTypeDevice;
  attributes->device = block ? block->device : -2;
  if (block) {
    attributes->hostPointer = block->on_host ? (void *)address : NULL;
    attributes->devicePointer = (void *)address;
  }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

static void count_copy(const void *to, const void *from, size_t bytes) {
  int to_device = kind_of(to) == cudaMemoryTypeDevice, from_device = kind_of(from) == cudaMemoryTypeDevice;
  if (!to_device && !from_device) return;
  enum counter copies = !from_device ? COPIES_TO_DEVICE : !to_device ? COPIES_TO_HOST : COPIES_ON_DEVICE;
  nullcuda_count(copies, 1);
  nullcuda_count(copies + 1, (long)bytes);
}
static cudaError_t copy(void *to, const void *from, size_t bytes) {
  count_copy(to, from, bytes);
  if (bytes <= nullcuda_device()->copied_bytes) memmove(to, from, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  nullcuda_count(HOST_WAITS, 1);
  return copy(to, from, bytes);
}
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  return copy(to, from, bytes);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                       cudaStream_t stream) {
  return copy(to, from, bytes);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  count_copy(to, from, width * height);
  if (width * height <= nullcuda_device()->copied_bytes)
    for (size_t row = 0; row < height; row++)
      memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                                      enum cudaMemcpyKind kind) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void *to, int value, size_t bytes) {
  if (bytes <= nullcuda_device()->copied_bytes) memset(to, value, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  return cudaMemset(to, value, bytes);
}

static char symbols[1 << 16];  // variables of device code, all at one address
EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
  *address = symbols;
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) { return cudaSuccess; }
EXPORT cudaError_t cudaHostUnregister(void *address) { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
  *pool = (cudaMemPool_t)nullcuda_handle;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
  *(unsigned long *)value = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t count) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) { return cudaSuccess; }
