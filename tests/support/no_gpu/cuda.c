/* The part of the CUDA driver that Triton's launcher calls, for a machine without a GPU: a launch does nothing.

   Pointers are taken as they come, so that tensors in host memory pass for tensors on a device. `launches` counts. */

typedef int CUresult;

static long launched = 0;
static long handles = 0;

long launches(void) { return launched; }

CUresult cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) {
  ++launched;
  return 0;
}

CUresult cuCtxGetCurrent(void **context) {
  *context = (void *)1;
  return 0;
}

CUresult cuCtxGetDevice(int *device) {
  *device = 0;
  return 0;
}

CUresult cuCtxSetCurrent(void *context) { return 0; }

CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = (void *)1;
  return 0;
}

CUresult cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return 0;
}

/* Every attribute that is asked for is a limit on shared memory, as an H100 has it, or goes into a report. */
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = 232448;
  return 0;
}

CUresult cuPointerGetAttribute(void **value, int attribute, void *pointer) { return 0; }

CUresult cuModuleLoadData(void **module, const void *image) {
  *module = (void *)1;
  return 0;
}

CUresult cuModuleUnload(void *module) { return 0; }

CUresult cuStreamIsCapturing(void *stream, int *status) {
  *status = 0;
  return 0;
}

/* Handles differ, so that a launch of another kernel can be told. */
CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)++handles;
  return 0;
}

/* 0: threads in a block; 3: bytes spilled; 4: registers. */
CUresult cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;
  return 0;
}

CUresult cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
CUresult cuFuncSetCacheConfig(void *function, int config) { return 0; }
CUresult cuCtxGetLimit(unsigned long *value, int limit) { return 0; }
CUresult cuCtxSetLimit(int limit, unsigned long value) { return 0; }
CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return 0;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "an error that this driver does not have";
  return 0;
}
