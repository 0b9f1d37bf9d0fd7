// A stand-in for libcuda that records launches: the tests hold the launcher's bytes against CUDA's own structures (cuda.h) without a GPU.
#include "cuda.h"
#include <stdint.h>
#include <string.h>

#define CALL __attribute__((visibility("default"))) CUresult CUDAAPI

// What the last launch looked like. `fake_sizes` says how many bytes to read through each kernel parameter.
typedef struct {
  uint64_t count, function, stream, misaligned_maps, context;
  uint32_t grid[3], block[3], shared, num_attributes;
  uint32_t attributes[8][17]; // id, then the value's 64 bytes
  uint32_t parameter_bytes;
  uint8_t parameters[8192];
} Record;

Record fake_last;
uint32_t fake_sizes[256], fake_num_sizes;
int fake_result, fake_version = 13020, fake_encodes, fake_large_clusters, fake_replacements, fake_replace_result;
static _Thread_local CUcontext current;

CALL cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  if (fake_result)
    return fake_result;
  Record record = {.count = fake_last.count + 1, .function = (uint64_t)function, .stream = (uint64_t)config->hStream,
                   .context = (uint64_t)current, .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
                   .block = {config->blockDimX, config->blockDimY, config->blockDimZ}, .shared = config->sharedMemBytes,
                   .num_attributes = config->numAttrs};
  for (uint32_t i = 0; i < config->numAttrs; ++i) {
    record.attributes[i][0] = config->attrs[i].id;
    memcpy(record.attributes[i] + 1, &config->attrs[i].value, 64);
  }
  for (uint32_t i = 0; i < fake_num_sizes; ++i) {
    record.misaligned_maps += fake_sizes[i] == 128 && (uintptr_t)parameters[i] % _Alignof(CUtensorMap);
    memcpy(record.parameters + record.parameter_bytes, parameters[i], fake_sizes[i]);
    record.parameter_bytes += fake_sizes[i];
  }
  fake_last = record;
  return CUDA_SUCCESS;
}

// The map says what it was made of: address, (type, rank, swizzle, fill, promotion), extents, strides, box.
CALL cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dims,
                            const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element_strides,
                            CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                            CUtensorMapFloatOOBfill fill) {
  uint64_t words[16] = {(uint64_t)address};
  words[1] = (uint64_t)type | (uint64_t)rank << 8 | 1u << 21 | (uint64_t)swizzle << 32 | (uint64_t)fill << 40 | (uint64_t)promotion << 48;
  for (cuuint32_t i = 0; i < rank; ++i) {
    words[2 + i] = dims[i];
    if (i + 1 < rank)
      words[7 + i] = strides[i];
    words[11 + i] |= (uint64_t)box[i] | (uint64_t)element_strides[i] << 32;
  }
  memcpy(map, words, sizeof words);
  ++fake_encodes;
  return (uintptr_t)map % _Alignof(CUtensorMap) || interleave ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// As above; from word 11 on the corners (lower, upper) of each spatial dimension; word 14 channels and pixels; word 15 element strides.
CALL cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dims,
                             const cuuint64_t *strides, const int *lower, const int *upper, cuuint32_t channels, cuuint32_t pixels,
                             const cuuint32_t *element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  uint64_t words[16] = {(uint64_t)address};
  words[1] = (uint64_t)type | (uint64_t)rank << 8 | 1u << 21 | (uint64_t)swizzle << 32 | (uint64_t)fill << 40 | (uint64_t)promotion << 48;
  for (cuuint32_t i = 0; i < rank; ++i) {
    words[2 + i] = dims[i];
    if (i + 1 < rank)
      words[7 + i] = strides[i];
    if (i + 2 < rank)
      words[11 + i] = (uint32_t)lower[i] | (uint64_t)(uint32_t)upper[i] << 32;
    words[15] |= (uint64_t)element_strides[i] << 8 * i;
  }
  words[14] = (uint64_t)channels | (uint64_t)pixels << 32;
  memcpy(map, words, sizeof words);
  ++fake_encodes;
  return (uintptr_t)map % _Alignof(CUtensorMap) || interleave ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CALL cuTensorMapReplaceAddress(CUtensorMap *map, void *address) {
  memcpy(map, &address, sizeof address);
  ++fake_replacements;
  return fake_replace_result ? fake_replace_result : (uintptr_t)map % _Alignof(CUtensorMap) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CALL cuCtxGetCurrent(CUcontext *context) { *context = current; return CUDA_SUCCESS; }
CALL cuCtxSetCurrent(CUcontext context) { current = context; return CUDA_SUCCESS; }
CALL cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)(uintptr_t)(0x1000 + device); return CUDA_SUCCESS; }
CALL cuDriverGetVersion(int *version) { *version = fake_version; return CUDA_SUCCESS; }
CALL cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  fake_large_clusters += attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED && value;
  return CUDA_SUCCESS;
}
CALL cuGetErrorName(CUresult code, const char **text) { *text = "CUDA_ERROR_FAKE"; return CUDA_SUCCESS; }
CALL cuGetErrorString(CUresult code, const char **text) { *text = "a fake error"; return CUDA_SUCCESS; }

// The rest of what Triton's own launcher links to.
CALL cuInit(unsigned flags) { return CUDA_SUCCESS; }
CALL cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CALL cuDeviceGet(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
CALL cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CALL cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) { *value = 227 * 1024; return CUDA_SUCCESS; }
CALL cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)0x2000; return CUDA_SUCCESS; }
CALL cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { *function = (CUfunction)0x3000; return CUDA_SUCCESS; }
CALL cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CALL cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) { *value = 1024; return CUDA_SUCCESS; }
CALL cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CALL cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = 0; return CUDA_SUCCESS; }
CALL cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CALL cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CALL cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) { *(CUdeviceptr *)data = pointer; return CUDA_SUCCESS; }
