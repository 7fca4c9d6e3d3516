/* What candle links of CUDA's libraries besides the driver: handles that stand for nothing, and
   products of matrices that are not computed. */

static int handle;

int cublasCreate_v2(void **to) { *to = &handle; return 0; }
int cublasDestroy_v2(void *it) { return 0; }
int cublasSetStream_v2(void *it, void *stream) { return 0; }
int cublasGemmEx() { return 0; }
int cublasGemmStridedBatchedEx() { return 0; }
int cublasSgemm_v2() { return 0; }
int cublasSgemmStridedBatched() { return 0; }
int cublasSetMathMode() { return 0; }
int curandCreateGenerator(void **to, int kind) { *to = &handle; return 0; }
int curandDestroyGenerator(void *it) { return 0; }
int curandSetStream(void *it, void *stream) { return 0; }
int curandSetPseudoRandomGeneratorSeed(void *it, unsigned long long seed) { return 0; }
