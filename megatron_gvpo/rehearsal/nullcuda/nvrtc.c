// NVRTC, with which Transformer Engine and PyTorch compile some kernels when they are first called: here nothing is
// compiled, since nothing runs. The questions that need no program stay with the real library.
#include "nullcuda.h"
#include <nvrtc.h>

EXPORT nvrtcResult nvrtcCreateProgram(nvrtcProgram *program, const char *source, const char *name, int count,
                                      const char *const *headers, const char *const *include_names) {
  *program = (nvrtcProgram)nullcuda_handle;
  return NVRTC_SUCCESS;
}
EXPORT nvrtcResult nvrtcDestroyProgram(nvrtcProgram *program) { return NVRTC_SUCCESS; }
EXPORT nvrtcResult nvrtcAddNameExpression(nvrtcProgram program, const char *name) { return NVRTC_SUCCESS; }
EXPORT nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char *const *options) {
  return NVRTC_SUCCESS;
}
EXPORT nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char *name, const char **lowered) {
  *lowered = "kernel";
  return NVRTC_SUCCESS;
}
static nvrtcResult one_byte(size_t *bytes) {
  *bytes = 1;
  return NVRTC_SUCCESS;
}
static nvrtcResult empty(char *text) {
  *text = 0;
  return NVRTC_SUCCESS;
}
EXPORT nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t *bytes) { return one_byte(bytes); }
EXPORT nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char *text) { return empty(text); }
EXPORT nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t *bytes) { return one_byte(bytes); }
EXPORT nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char *text) { return empty(text); }
EXPORT nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t *bytes) { return one_byte(bytes); }
EXPORT nvrtcResult nvrtcGetPTX(nvrtcProgram program, char *text) { return empty(text); }
