// cuBLAS and cuBLASLt: handles that need no device, and products that are counted and not computed. Descriptions
// of matrices are the real library's own, which needs no device for them: what it refuses, it refuses here.
// stubs.c answers the library's other functions.
#define _GNU_SOURCE
#include "nullcuda.h"
#include <cublasLt.h>
#include <cublas_v2.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static int new_handle(void **handle) {
  *handle = calloc(1, 4096);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) { return new_handle((void **)handle); }
EXPORT cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  free(handle);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
  *mode = CUBLAS_POINTER_MODE_HOST;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
  *mode = CUBLAS_DEFAULT_MATH;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { return new_handle((void **)handle); }
EXPORT cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  free(handle);
  return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t product(long m, long n, long k, long batch, int is_fp8) {
  long flops = 2 * m * n * k * batch;
  if (!nullcuda_launch("a product of cuBLAS")) return CUBLAS_STATUS_NOT_SUPPORTED;
  nullcuda_count(MATRIX_PRODUCTS, 1);
  nullcuda_count(MATRIX_FLOPS, flops);
  if (is_fp8) nullcuda_count(MATRIX_FLOPS_FP8, flops);
  return CUBLAS_STATUS_SUCCESS;
}
#define GEMM_INPUTS(SCALAR, TYPE)                                                                                    \
  cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const SCALAR *alpha,       \
      const TYPE *a
EXPORT cublasStatus_t cublasSgemm_v2(GEMM_INPUTS(float, float), int lda, const float *b, int ldb, const float *beta,
                                     float *c, int ldc) {
  return product(m, n, k, 1, 0);
}
EXPORT cublasStatus_t cublasDgemm_v2(GEMM_INPUTS(double, double), int lda, const double *b, int ldb,
                                     const double *beta, double *c, int ldc) {
  return product(m, n, k, 1, 0);
}
EXPORT cublasStatus_t cublasSgemmStridedBatched(GEMM_INPUTS(float, float), int lda, long long sa, const float *b,
                                                int ldb, long long sb, const float *beta, float *c, int ldc,
                                                long long sc, int batch) {
  return product(m, n, k, batch, 0);
}
EXPORT cublasStatus_t cublasDgemmStridedBatched(GEMM_INPUTS(double, double), int lda, long long sa, const double *b,
                                                int ldb, long long sb, const double *beta, double *c, int ldc,
                                                long long sc, int batch) {
  return product(m, n, k, batch, 0);
}
EXPORT cublasStatus_t cublasSgemmEx(GEMM_INPUTS(float, void), cudaDataType type_a, int lda, const void *b,
                                    cudaDataType type_b, int ldb, const float *beta, void *c, cudaDataType type_c,
                                    int ldc) {
  return product(m, n, k, 1, 0);
}
EXPORT cublasStatus_t cublasGemmEx(GEMM_INPUTS(void, void), cudaDataType type_a, int lda, const void *b,
                                   cudaDataType type_b, int ldb, const void *beta, void *c, cudaDataType type_c,
                                   int ldc, cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
  return product(m, n, k, 1, 0);
}
EXPORT cublasStatus_t cublasGemmStridedBatchedEx(GEMM_INPUTS(void, void), cudaDataType type_a, int lda, long long sa,
                                                 const void *b, cudaDataType type_b, int ldb, long long sb,
                                                 const void *beta, void *c, cudaDataType type_c, int ldc, long long sc,
                                                 int batch, cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
  return product(m, n, k, batch, 0);
}

// The real library's functions: PyTorch loads it for itself alone, so that the linker does not find them here.
#define TEXT(x) #x
#define LIBRARY(major) "libcublasLt.so." TEXT(major)
static void *real(const char *name) {
  return dlsym(dlopen(LIBRARY(CUBLAS_VER_MAJOR), RTLD_LAZY | RTLD_NOLOAD), name);
}
#define REAL(function) ((typeof(&function))real(#function))

static long of_layout(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, size_t bytes) {
  long value = 0;  // attributes of four or eight bytes, little end first
  size_t written;
  REAL(cublasLtMatrixLayoutGetAttribute)(layout, attribute, &value, bytes, &written);
  return value;
}
EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void *alpha,
                                     const void *a, cublasLtMatrixLayout_t layout_a, const void *b,
                                     cublasLtMatrixLayout_t layout_b, const void *beta, const void *c,
                                     cublasLtMatrixLayout_t layout_c, void *d, cublasLtMatrixLayout_t layout_d,
                                     const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t workspace_bytes,
                                     cudaStream_t stream) {
  int32_t transposed = CUBLAS_OP_N;
  size_t written;
  REAL(cublasLtMatmulDescGetAttribute)(description, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed, &written);
  long rows = of_layout(layout_a, CUBLASLT_MATRIX_LAYOUT_ROWS, 8);
  long columns = of_layout(layout_a, CUBLASLT_MATRIX_LAYOUT_COLS, 8);
  long n = of_layout(layout_d, CUBLASLT_MATRIX_LAYOUT_COLS, 8);
  long batch = of_layout(layout_d, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, 4);
  long type = of_layout(layout_a, CUBLASLT_MATRIX_LAYOUT_TYPE, 4);
  int is_transposed = transposed != CUBLAS_OP_N;
  int is_fp8 = type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
  return product(is_transposed ? columns : rows, n, is_transposed ? rows : columns, batch ? batch : 1, is_fp8);
}
EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                                                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                     cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                     cublasLtMatmulPreference_t preference, int requested,
                                                     cublasLtMatmulHeuristicResult_t results[], int *returned) {
  memset(results, 0, sizeof *results);
  results->state = CUBLAS_STATUS_SUCCESS;
  *returned = 1;
  return CUBLAS_STATUS_SUCCESS;
}
