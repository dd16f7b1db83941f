// A CUDA runtime without a GPU. Memory is host memory, copies are real, kernels do nothing. Waits and launches are counted.
// A function that only has to succeed is not here: make_library.py writes a stub for it that returns 0.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#undef cudaGetDeviceProperties

namespace {
const size_t TOTAL = 80ull << 30;  // bytes of one H100
struct Block {
    size_t bytes;
    cudaMemoryType type;
    int device;
};
std::mutex mutex;
std::map<char *, Block> blocks;
std::map<unsigned long long, size_t> physical;  // handles of cuMemCreate
std::atomic<long> handles{4096}, waits{0}, launches{0};
std::atomic<size_t> used{0};
thread_local int current = 0;

int devices() {
    const char *text = getenv("FAKE_CUDA_DEVICES");
    return text ? atoi(text) : 1;
}

void *handle() { return (void *)(handles += 16); }

void *take(size_t bytes, cudaMemoryType type) {
    bytes = ((bytes ? bytes : 1) + 4095) & ~size_t(4095);
    void *place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return nullptr;
    std::lock_guard<std::mutex> lock(mutex);
    blocks[(char *)place] = {bytes, type, current};
    if (type == cudaMemoryTypeDevice) used += bytes;
    return place;
}

void drop(void *place) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find((char *)place);
    if (found == blocks.end()) return;
    if (found->second.type == cudaMemoryTypeDevice) used -= found->second.bytes;
    munmap(place, found->second.bytes);
    blocks.erase(found);
}
}  // namespace

extern "C" {
// read by run_cells.py and measure_memory.py
long fake_cuda_waits() { return waits; }
long fake_cuda_launches() { return launches; }
size_t fake_cuda_used() { return used; }
size_t fake_cuda_pinned() {
    size_t bytes = 0;
    std::lock_guard<std::mutex> lock(mutex);
    for (auto &[place, block] : blocks) bytes += block.type == cudaMemoryTypeHost ? block.bytes : 0;
    return bytes;
}
void fake_cuda_forget() { waits = launches = 0; }

// modules and kernels
void **__cudaRegisterFatBinary(void *) {
    static void *handle[4];
    return handle;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = *block = dim3(1, 1, 1);
    *shared = 0;
    *(void **)stream = nullptr;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(void **kernel, const void *function) {
    *kernel = (void *)function;
    return cudaSuccess;
}
cudaError_t launched() {
    launches++;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, void *) { return launched(); }
cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) { return launched(); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **) { return launched(); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *found, const void *) {
    *found = {};
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->binaryVersion = found->ptxVersion = 90;
    found->maxDynamicSharedSizeBytes = 232448;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t, unsigned) {
    *blocks = 2;
    return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **place, const void *) {
    static char bytes[4096];
    *place = bytes;
    return cudaSuccess;
}

// the device: an H100
cudaError_t cudaGetDeviceCount(int *count) {
    *count = devices();
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return cudaErrorInvalidDevice;
    current = device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int device) {
    *found = {};
    strcpy(found->name, "NVIDIA H100 80GB HBM3");
    found->totalGlobalMem = TOTAL;
    found->sharedMemPerBlock = 49152;
    found->sharedMemPerBlockOptin = 232448;
    found->sharedMemPerMultiprocessor = 233472;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->warpSize = 32;
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->totalConstMem = 65536;
    found->major = 9;
    found->textureAlignment = 512;
    found->multiProcessorCount = 132;
    found->maxThreadsPerMultiProcessor = 2048;
    found->maxBlocksPerMultiProcessor = 32;
    found->l2CacheSize = 50 << 20;
    found->memoryBusWidth = 5120;
    found->unifiedAddressing = found->concurrentKernels = found->managedMemory = found->ECCEnabled = 1;
    found->asyncEngineCount = 3;
    found->pciBusID = device + 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    static const std::map<int, int> known = {{cudaDevAttrMaxThreadsPerBlock, 1024},
                                             {cudaDevAttrWarpSize, 32},
                                             {cudaDevAttrMultiProcessorCount, 132},
                                             {cudaDevAttrComputeCapabilityMajor, 9},
                                             {cudaDevAttrComputeCapabilityMinor, 0},
                                             {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
                                             {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
                                             {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
                                             {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
                                             {cudaDevAttrMaxBlockDimX, 1024},
                                             {cudaDevAttrMaxGridDimX, 2147483647}};
    auto found = known.find(attribute);
    *value = found == known.end() ? 1 : found->second;
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device) {
    snprintf(text, bytes, "0000:%02d:00.0", device + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
const char *cudaGetErrorName(cudaError_t) { return "fake"; }
const char *cudaGetErrorString(cudaError_t) { return "an error of the fake CUDA runtime"; }

// memory and copies
cudaError_t cudaMalloc(void **place, size_t bytes) {
    *place = used + bytes > TOTAL ? nullptr : take(bytes, cudaMemoryTypeDevice);
    return *place ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaMallocAsync(void **place, size_t bytes, cudaStream_t) { return cudaMalloc(place, bytes); }
cudaError_t cudaFree(void *place) {
    drop(place);
    return cudaSuccess;
}
cudaError_t cudaFreeAsync(void *place, cudaStream_t) { return cudaFree(place); }
cudaError_t cudaHostAlloc(void **place, size_t bytes, unsigned) {
    *place = take(bytes, cudaMemoryTypeHost);
    return *place ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeHost(void *place) { return cudaFree(place); }
cudaError_t cudaHostRegister(void *place, size_t bytes, unsigned) {
    std::lock_guard<std::mutex> lock(mutex);
    return blocks.insert({(char *)place, {bytes, cudaMemoryTypeHost, current}}).second ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered;
}
cudaError_t cudaHostUnregister(void *place) {
    std::lock_guard<std::mutex> lock(mutex);
    return blocks.erase((char *)place) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = TOTAL;
    *free = TOTAL - used;
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *place) {
    *found = {};
    found->type = cudaMemoryTypeUnregistered;
    std::lock_guard<std::mutex> lock(mutex);
    auto block = blocks.upper_bound((char *)place);
    if (block == blocks.begin()) return cudaSuccess;
    --block;
    if ((char *)place >= block->first + block->second.bytes) return cudaSuccess;
    found->type = block->second.type;
    found->device = block->second.device;
    found->devicePointer = (void *)place;
    if (found->type == cudaMemoryTypeHost) found->hostPointer = (void *)place;
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    if (to && from) memmove(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    waits++;
    return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind, cudaStream_t) {
    for (size_t row = 0; row < height; row++) memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *place, int value, size_t bytes) {
    memset(place, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *place, int value, size_t bytes, cudaStream_t) { return cudaMemset(place, value, bytes); }

// streams and events: all work is done when it is asked for
cudaError_t waited() {
    waits++;
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    *stream = (cudaStream_t)handle();
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) {
    *priority = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *,
                                     const cudaGraphNode_t **, const cudaGraphEdgeData **, size_t *) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return waited(); }
cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = (cudaEvent_t)handle();
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return waited(); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return waited(); }

// the driver's functions that torch asks for by name
int fake_success() { return 0; }
int fake_reserve(unsigned long long *place, size_t bytes, size_t, unsigned long long, unsigned long long) {
    *place = (unsigned long long)take(bytes, cudaMemoryTypeDevice);
    used -= bytes;
    return *place ? 0 : 2;
}
int fake_free(unsigned long long place, size_t bytes) {
    used += bytes;
    drop((void *)place);
    return 0;
}
int fake_create(unsigned long long *found, size_t bytes, const void *, unsigned long long) {
    if (used + bytes > TOTAL) return 2;
    used += bytes;
    *found = (unsigned long long)handle();
    std::lock_guard<std::mutex> lock(mutex);
    physical[*found] = bytes;
    return 0;
}
int fake_release(unsigned long long found) {
    std::lock_guard<std::mutex> lock(mutex);
    used -= physical[found];
    physical.erase(found);
    return 0;
}
int fake_granularity(size_t *bytes, const void *, int) {
    *bytes = 2u << 20;
    return 0;
}
int fake_context_state(int, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}
int fake_context(void **found) {
    *found = (void *)16;
    return 0;
}
int fake_device(int *device, int number) {
    *device = number;
    return 0;
}
int fake_attribute(int *value, int attribute, int) { return cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, 0); }
int fake_error_text(int, const char **text) {
    *text = "an error of the fake driver";
    return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
    static const std::map<std::string, void *> known = {{"cuMemAddressReserve", (void *)fake_reserve},
                                                        {"cuMemAddressFree", (void *)fake_free},
                                                        {"cuMemCreate", (void *)fake_create},
                                                        {"cuMemRelease", (void *)fake_release},
                                                        {"cuMemGetAllocationGranularity", (void *)fake_granularity},
                                                        {"cuDevicePrimaryCtxGetState", (void *)fake_context_state},
                                                        {"cuCtxGetCurrent", (void *)fake_context},
                                                        {"cuDeviceGet", (void *)fake_device},
                                                        {"cuDeviceGetAttribute", (void *)fake_attribute},
                                                        {"cuGetErrorString", (void *)fake_error_text}};
    auto found = known.find(name);
    *function = found == known.end() ? (void *)fake_success : found->second;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// libraries, without their headers: these need others that torch's wheels lack
int new_handle(void **found) {
    *found = handle();
    return 0;
}
int cublasCreate_v2(void **found) { return new_handle(found); }
int cublasLtCreate(void **found) { return new_handle(found); }
int cublasLtMatmulDescCreate(void **found, int, int) { return new_handle(found); }
int cublasLtMatrixLayoutCreate(void **found, int, uint64_t, uint64_t, int64_t) { return new_handle(found); }
int cublasLtMatmulPreferenceCreate(void **found) { return new_handle(found); }
int cudnnCreate(void **found) { return new_handle(found); }
int cublasGetMathMode(void *, int *mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void *, int *mode) { return *mode = 0; }
int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, void *found, int *count) {
    memset(found, 0, 64 + 8 + 4 + 4 + 16);  // cublasLtMatmulHeuristicResult_t
    *count = 1;
    return 0;
}
size_t cublasLtGetVersion() { return 130000; }
size_t cudnnGetVersion() { return 91300; }
}
