// Streams and events. Nothing runs on the device, so all work is done when it is asked for; a host that waits
// is counted.
#include "nullcuda.h"
#include <cuda_runtime_api.h>
#include <stdlib.h>

static cudaError_t new_handle(void **handle) {
  *handle = malloc(64);  // distinct, and never null: that is the default stream
  return cudaSuccess;
}
static cudaError_t waited(void) {
  nullcuda_count(HOST_WAITS, 1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize(void) { return waited(); }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return waited(); }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) { return waited(); }

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { return new_handle((void **)stream); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return new_handle((void **)stream); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return new_handle((void **)stream);
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  free(stream);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  function(data);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return new_handle((void **)event); }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return new_handle((void **)event); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaSuccess; }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaSuccess; }
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = 1000.0f;  // long: Triton's autotuner repeats a kernel until enough time has passed
  return cudaSuccess;
}

// Graphs are not captured (stubs.c refuses the functions that would).
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
