// Settings from the environment, and counters.
#include "nullcuda.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char nullcuda_handle[4096];

static long counters[COUNTERS];
static const char *const names[COUNTERS] = {
    "kernel_launches",  "host_waits",      "copies_to_device", "bytes_to_device",
    "copies_to_host",   "bytes_to_host",   "copies_on_device", "bytes_on_device",
    "matrix_products",  "matrix_flops",    "matrix_flops_fp8", "failed_reservations",
};

void nullcuda_count(enum counter counter, long amount) { __sync_fetch_and_add(&counters[counter], amount); }

// For the program that rehearses: reads counter number `index`; a null name ends the list.
EXPORT const char *nullcuda_counter_name(int index) {
  return index >= 0 && index < COUNTERS ? names[index] : NULL;
}
EXPORT long nullcuda_counter(int index) { return index >= 0 && index < COUNTERS ? counters[index] : 0; }

static long number(const char *variable, long otherwise) {
  const char *value = getenv(variable);
  return value ? atol(value) : otherwise;
}
static struct device device;
static void read_device(void) {
  const char *name = getenv("NULLCUDA_NAME"), *kernels = getenv("NULLCUDA_KERNELS");
  device = (struct device){
      .count = (int)number("NULLCUDA_DEVICES", 1),
      .bytes = (size_t)number("NULLCUDA_BYTES", 84492288000L),
      .capability = (int)number("NULLCUDA_CAPABILITY", 90),
      .multiprocessors = (int)number("NULLCUDA_SMS", 132),
      .shared_bytes = (size_t)number("NULLCUDA_SHARED_BYTES", 232448),
      .name = name ? name : "null CUDA device",
      .copied_bytes = (size_t)number("NULLCUDA_COPY", 1 << 20),
      .refuses_kernels = kernels && !strcmp(kernels, "refuse"),
  };
}
const struct device *nullcuda_device(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, read_device);
  return &device;
}

__thread int nullcuda_last_error;
int nullcuda_fail(int error) { return nullcuda_last_error = error; }

static const char *refused = "";
EXPORT const char *nullcuda_refused(void) { return refused; }  // the last function that was not supported
int nullcuda_refuse(const char *function) {
  refused = function;
  if (getenv("NULLCUDA_TRACE")) fprintf(stderr, "nullcuda: %s is not supported\n", function);
  return 801;  // cudaErrorNotSupported and CUDA_ERROR_NOT_SUPPORTED
}

// A program that computes what kernels would permits its thread to launch them, and computes their results itself.
static __thread int is_permitted;
EXPORT int nullcuda_permit(int permitted) {
  int before = is_permitted;
  is_permitted = permitted;
  return before;
}
int nullcuda_launch(const char *kernel) {
  nullcuda_count(KERNEL_LAUNCHES, 1);
  if (is_permitted || !nullcuda_device()->refuses_kernels) return 1;
  nullcuda_refuse(kernel);
  return 0;
}
