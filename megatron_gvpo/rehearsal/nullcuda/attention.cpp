// The three functions of Transformer Engine's core library that ask cuDNN for a graph, which needs a device. They
// answer shapes and sizes, and compute nothing. Everything else of that library is the real one.
#include "nullcuda.h"
#include <dlfcn.h>
#include <initializer_list>
#include <stdexcept>
#include <transformer_engine/fused_attn.h>
#include <transformer_engine/transformer_engine.h>

// The real library's own functions, found when they are called: it is loaded after this one.
template <typename F> static F *find(const char *name, F *) { return (F *)dlsym(RTLD_DEFAULT, name); }
#define REAL(function) find(#function, (decltype(&function)) nullptr)

template <typename T> static T get(NVTEFusedAttnFwdParams p, NVTEFusedAttnFwdParamsAttribute attribute) {
  T value{};
  size_t written;
  REAL(nvte_get_fused_attn_fwd_params_attribute)(p, attribute, &value, sizeof value, &written);
  return value;
}
template <typename T> static T get(NVTEFusedAttnBwdParams p, NVTEFusedAttnBwdParamsAttribute attribute) {
  T value{};
  size_t written;
  REAL(nvte_get_fused_attn_bwd_params_attribute)(p, attribute, &value, sizeof value, &written);
  return value;
}
template <typename T> static T get(NVTEFusedAttnConfig c, NVTEFusedAttnConfigAttribute attribute) {
  T value{};
  size_t written;
  REAL(nvte_get_fused_attn_config_attribute)(c, attribute, &value, sizeof value, &written);
  return value;
}
static void describe(NVTETensor tensor, NVTEDType type, std::initializer_list<size_t> sizes) {
  NVTEBasicTensor basic{nullptr, type, {}};
  for (size_t size : sizes) basic.shape.data[basic.shape.ndim++] = size;
  REAL(nvte_set_tensor_param_v2)(tensor, kNVTERowwiseData, &basic, sizeof basic);
}

// Heads that cuDNN 9.20 has a fused kernel for: on sm_90 up to 256, on sm_100 up to 128, and latent attention's
// 192 and 128 on both. Without bf16 or before sm_90 there is none for packs.
extern "C" EXPORT NVTE_Fused_Attn_Backend nvte_get_fused_attn_backend_v2(NVTEFusedAttnConfig config,
                                                                         const char **message) {
  auto type = get<NVTEDType>(config, kNVTEFusedAttnConfigQKVDtype);
  auto qk = get<size_t>(config, kNVTEFusedAttnConfigHeadDimQK), v = get<size_t>(config, kNVTEFusedAttnConfigHeadDimV);
  int capability = nullcuda_device()->capability;
  bool is_latent = qk == 192 && v == 128;
  size_t larger = qk > v ? qk : v, smaller = qk > v ? v : qk;
  bool fits = capability >= 100 ? larger <= 128 || is_latent
                                : larger <= 256 && (qk == v || smaller < 128 || is_latent);
  bool has_kernel = type == kNVTEBFloat16 && capability >= 90 && qk % 8 == 0 && v % 8 == 0 && fits;
  *message = has_kernel ? "" : "the null CUDA knows no kernel of cuDNN for this";
  return has_kernel ? NVTE_F16_arbitrary_seqlen : NVTE_No_Backend;
}

// Both passes are called twice: first to ask for the sizes of workspace and saved tensors, then with a workspace.
extern "C" EXPORT void nvte_fused_attn_fwd_v2(NVTEFusedAttnFwdParams params) {
  auto workspace = get<NVTETensor>(params, kNVTEFusedAttnFwdParamsWorkspace);
  if (REAL(nvte_tensor_data)(workspace)) {
    if (!nullcuda_launch("cuDNN's attention")) throw std::runtime_error("cuDNN's attention was not permitted");
    return;
  }
  auto q = REAL(nvte_tensor_shape)(get<NVTETensor>(params, kNVTEFusedAttnFwdParamsQ));
  auto sequences = REAL(nvte_tensor_shape)(get<NVTETensor>(params, kNVTEFusedAttnFwdParamsCuSeqlensQ)).data[0];
  auto *saved = get<NVTETensorPack *>(params, kNVTEFusedAttnFwdParamsAuxCtxTensors);
  if (q.ndim == 3)  // a pack: [tokens, heads, width]
    describe(saved->tensors[0], kNVTEFloat32, {q.data[0], q.data[1], 1});
  else
    describe(saved->tensors[0], kNVTEFloat32, {q.data[0] * q.data[1], q.data[2], 1});
  describe(saved->tensors[1], kNVTEInt64, {2});  // the state of the random numbers
  saved->size = 2;
  describe(workspace, kNVTEByte, {64 * sequences + 4096});  // lengths and offsets: an assumption
}
extern "C" EXPORT void nvte_fused_attn_bwd_v2(NVTEFusedAttnBwdParams params) {
  auto workspace = get<NVTETensor>(params, kNVTEFusedAttnBwdParamsWorkspace);
  if (REAL(nvte_tensor_data)(workspace)) {
    if (!nullcuda_launch("cuDNN's attention")) throw std::runtime_error("cuDNN's attention was not permitted");
    return;
  }
  auto q = REAL(nvte_tensor_shape)(get<NVTETensor>(params, kNVTEFusedAttnBwdParamsQ));
  size_t rows = 1;
  for (size_t i = 0; i + 1 < q.ndim; i++) rows *= q.data[i];
  // An assumption: dQ is summed in fp32, and softmax's sums are one number a row.
  describe(workspace, kNVTEByte, {rows * (4 * q.data[q.ndim - 1] + 4) + 4096});
}
