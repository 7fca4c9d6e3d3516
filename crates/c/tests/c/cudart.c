/* What PyTorch asks of CUDA's runtime before it allocates, on a machine without a GPU: the bench `c`
 * loads it before PyTorch. It answers that the current device is the second of two. */
int cudaGetDevice(int *device) {
  *device = 1;
  return 0;
}

int cudaSetDevice(int device) {
  (void)device;
  return 0;
}

int cudaGetDeviceCount(int *count) {
  *count = 2;
  return 0;
}
