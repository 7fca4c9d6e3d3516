/* A program in C over the header: every function, and every value that must be refused.
 *
 * abi              linked with the library, on the host
 * abi LIBRARY      the same through dlopen
 * abi LIBRARY CUDA the same on a CUDA driver library that is loaded first
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lowtide.h"

#define CHECK(held)                                                                    \
  do {                                                                                 \
    if (!(held)) {                                                                     \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #held, api.last_error()); \
      exit(1);                                                                         \
    }                                                                                  \
  } while (0)

#define FUNCTIONS(of)                                                                       \
  of(abi_version) of(any_stream) of(status_name) of(last_error) of(open) of(close)          \
  of(set_default) of(get_default) of(alloc) of(free) of(record_use) of(end_stream)          \
  of(find_block) of(shrink) of(set_limit) of(get_statistics) of(torch_alloc) of(torch_free) \
  of(torch_record_stream) of(torch_empty_cache) of(torch_base_alloc)                        \
  of(torch_memory_fraction) of(ort_bind) of(ort_alloc) of(ort_free) of(ort_empty_cache)

#define MEMBER(name) __typeof__(&lowtide_##name) name;
struct api {
  FUNCTIONS(MEMBER)
};
static struct api api;

static uint32_t backend = LOWTIDE_BACKEND_HOST;
static lowtide_stream one, two;

#ifdef LINKED
#define LINK(name) api.name = lowtide_##name;
static void find(const char *library) {
  (void)library;
  FUNCTIONS(LINK)
}
#else
#define LOAD(name)                                             \
  *(void **)&api.name = dlsym(handle, "lowtide_" #name);       \
  if (!api.name) {                                             \
    fprintf(stderr, "%s is not in %s\n", #name, library);      \
    exit(1);                                                   \
  }
static void find(const char *library) {
  void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  FUNCTIONS(LOAD)
}
#endif

/* Loads a CUDA driver and creates two streams on device 0; its context becomes current. */
static int (*memset_async)(unsigned long long, unsigned char, size_t, void *);
static int (*stream_synchronize)(void *);
static int (*synchronize)(void);
static int (*read_back)(void *, unsigned long long, size_t);
static void start_cuda(const char *path) {
  void *cuda = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!cuda) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  int (*init)(unsigned);
  int (*retain)(void **, int);
  int (*set)(void *);
  int (*create)(void **, unsigned);
  *(void **)&init = dlsym(cuda, "cuInit");
  *(void **)&retain = dlsym(cuda, "cuDevicePrimaryCtxRetain");
  *(void **)&set = dlsym(cuda, "cuCtxSetCurrent");
  *(void **)&create = dlsym(cuda, "cuStreamCreate");
  *(void **)&memset_async = dlsym(cuda, "cuMemsetD8Async");
  *(void **)&stream_synchronize = dlsym(cuda, "cuStreamSynchronize");
  *(void **)&synchronize = dlsym(cuda, "cuCtxSynchronize");
  *(void **)&read_back = dlsym(cuda, "cuMemcpyDtoH_v2");
  void *context;
  if (init(0) || retain(&context, 0) || set(context) || create(&one, 1) || create(&two, 1)) {
    fprintf(stderr, "CUDA does not start\n");
    exit(1);
  }
  backend = LOWTIDE_BACKEND_CUDA;
}

static lowtide_allocator opened(uint64_t limit) {
  lowtide_options options = {.struct_size = sizeof options, .backend = backend, .name = "abi"};
  options.limit_bytes = limit;
  options.reserve_bytes = (uint64_t)1 << 32;
  lowtide_allocator allocator = 7;
  CHECK(api.open(&options, &allocator) == LOWTIDE_STATUS_OK && allocator != 0);
  return allocator;
}

static void *taken(lowtide_allocator allocator, size_t size, lowtide_stream stream) {
  void *block = NULL;
  CHECK(api.alloc(allocator, 0, size, 0, stream, &block) == LOWTIDE_STATUS_OK && block);
  CHECK((uintptr_t)block % 256 == 0);
  if (memset_async) {
    CHECK(stream == api.any_stream() || memset_async((uintptr_t)block, 1, size, stream) == 0);
  } else {
    memset(block, 1, size);
  }
  return block;
}

static lowtide_statistics figures(lowtide_allocator allocator) {
  lowtide_statistics figures = {.struct_size = sizeof figures};
  CHECK(api.get_statistics(allocator, LOWTIDE_ALL_DEVICES, &figures) == LOWTIDE_STATUS_OK);
  CHECK(figures.struct_size == sizeof figures);
  return figures;
}

#define REFUSED(status, call)                                                 \
  do {                                                                        \
    lowtide_status got = (call);                                              \
    if (got != LOWTIDE_STATUS_##status || !*api.last_error()) {               \
      fprintf(stderr, "%s:%d: %s: %s, %s\n", __FILE__, __LINE__, #call,       \
              api.status_name(got), api.last_error());                        \
      exit(1);                                                                \
    }                                                                         \
  } while (0)

static void blocks(void) {
  lowtide_allocator allocator = opened(0);
  void *block = taken(allocator, 1000, one);
  lowtide_block found = {.struct_size = sizeof found};
  CHECK(api.find_block(allocator, (char *)block + 999, &found) == LOWTIDE_STATUS_OK);
  CHECK(found.base == block && found.size == 1024 && found.requested == 1000 && !found.device);
  CHECK(figures(allocator).live_bytes == 1024 && figures(allocator).requested_bytes == 1000);
  CHECK(figures(allocator).live_blocks == 1 && figures(allocator).committed_bytes >= 1024);
  CHECK(api.record_use(allocator, 0, block, two) == LOWTIDE_STATUS_OK);
  CHECK(api.record_use(allocator, 0, block, two) == LOWTIDE_STATUS_OK);
  CHECK(api.free(allocator, 0, block, one) == LOWTIDE_STATUS_OK);
  REFUSED(NOT_LIVE, api.free(allocator, 0, block, one));
  REFUSED(NOT_LIVE, api.record_use(allocator, 0, block, one));
  REFUSED(NOT_LIVE, api.find_block(allocator, block, &found));
  /* Of any stream, on either end. */
  block = taken(allocator, 1 << 20, api.any_stream());
  CHECK(api.free(allocator, 0, block, one) == LOWTIDE_STATUS_OK);
  block = taken(allocator, 1 << 20, one);
  CHECK(api.free(allocator, 0, block, api.any_stream()) == LOWTIDE_STATUS_OK);
  block = taken(allocator, 1 << 20, NULL);
  CHECK(api.free(allocator, 0, block, NULL) == LOWTIDE_STATUS_OK);
  /* Nothing is taken for 0 bytes, and freeing nothing is well. */
  void *none = &none;
  CHECK(api.alloc(allocator, 0, 0, 0, one, &none) == LOWTIDE_STATUS_OK && !none);
  CHECK(api.free(allocator, 0, NULL, one) == LOWTIDE_STATUS_OK);
  CHECK(api.end_stream(allocator, 0, two) == LOWTIDE_STATUS_OK);
  CHECK(api.end_stream(allocator, 0, two) == LOWTIDE_STATUS_OK);
  uint64_t released = 7, committed = figures(allocator).committed_bytes;
  CHECK(api.shrink(allocator, LOWTIDE_ALL_DEVICES, 0, &released) == LOWTIDE_STATUS_OK);
  CHECK(released == committed - figures(allocator).committed_bytes && released > 0);
  CHECK(api.shrink(allocator, 0, 0, NULL) == LOWTIDE_STATUS_OK);
  /* Another device, whose blocks are not of the first. */
  CHECK(api.alloc(allocator, 1, 4096, 4096, NULL, &block) == LOWTIDE_STATUS_OK);
  CHECK((uintptr_t)block % 4096 == 0);
  CHECK(api.find_block(allocator, block, &found) == LOWTIDE_STATUS_OK && found.device == 1);
  REFUSED(FOREIGN_ADDRESS, api.free(allocator, 0, block, NULL));
  REFUSED(LIVE_BLOCKS, api.close(allocator));
  void *first = taken(allocator, 1, one);
  CHECK(api.free(allocator, 0, first, one) == LOWTIDE_STATUS_OK);
  CHECK(api.free(allocator, 1, block, NULL) == LOWTIDE_STATUS_OK);
  CHECK(api.close(allocator) == LOWTIDE_STATUS_OK);
  REFUSED(INVALID_HANDLE, api.close(allocator));
}

static void limits(void) {
  lowtide_allocator allocator = opened(64 << 20);
  void *block = &block;
  REFUSED(OUT_OF_MEMORY, api.alloc(allocator, 0, 65 << 20, 0, one, &block));
  CHECK(!block && strstr(api.last_error(), "cannot allocate") && strstr(api.last_error(), "limit"));
  REFUSED(TOO_LARGE, api.alloc(allocator, 0, SIZE_MAX, 0, one, &block));
  REFUSED(TOO_LARGE, api.alloc(allocator, 0, SIZE_MAX - 4095, 0, one, &block));
  REFUSED(TOO_LARGE, api.alloc(allocator, 0, SIZE_MAX / 2, 0, one, &block));
  CHECK(figures(allocator).alloc_failures_total == 4);
  CHECK(api.set_limit(allocator, 0, 128 << 20) == LOWTIDE_STATUS_OK);
  CHECK(figures(allocator).limit_bytes == 128 << 20);
  block = taken(allocator, 65 << 20, one);
  CHECK(api.free(allocator, 0, block, one) == LOWTIDE_STATUS_OK);
  CHECK(api.close(allocator) == LOWTIDE_STATUS_OK);
}

static void refusals(void) {
  lowtide_allocator allocator = opened(0);
  void *block = taken(allocator, 4096, one);
  void *other = NULL;
  lowtide_block found = {.struct_size = sizeof found};
  lowtide_statistics small = {.struct_size = sizeof small - 1};
  REFUSED(NULL_POINTER, api.open(NULL, NULL));
  REFUSED(NULL_POINTER, api.alloc(allocator, 0, 1, 0, one, NULL));
  REFUSED(NULL_POINTER, api.record_use(allocator, 0, NULL, one));
  REFUSED(NULL_POINTER, api.find_block(allocator, block, NULL));
  REFUSED(NULL_POINTER, api.find_block(allocator, NULL, &found));
  REFUSED(NULL_POINTER, api.get_statistics(allocator, 0, NULL));
  REFUSED(NULL_POINTER, api.get_default(NULL));
  REFUSED(VERSION, api.get_statistics(allocator, 0, &small));
  lowtide_options options = {.struct_size = 8};
  lowtide_allocator none = 7;
  REFUSED(VERSION, api.open(&options, &none));
  CHECK(none == 0 && strstr(api.last_error(), "struct_size"));
  options.struct_size = sizeof options;
  options.backend = 9;
  REFUSED(INVALID_ARGUMENT, api.open(&options, &none));
  CHECK(strstr(api.last_error(), "`options.backend` is 9: expected"));
  for (int nth = 0; nth < 4; nth++) {
    const lowtide_allocator wrong[] = {0, allocator + 1, allocator ^ ((uint64_t)1 << 40), UINT64_MAX};
    REFUSED(INVALID_HANDLE, api.alloc(wrong[nth], 0, 1, 0, one, &other));
    REFUSED(INVALID_HANDLE, api.free(wrong[nth], 0, block, one));
    REFUSED(INVALID_HANDLE, api.record_use(wrong[nth], 0, block, one));
    REFUSED(INVALID_HANDLE, api.end_stream(wrong[nth], 0, one));
    REFUSED(INVALID_HANDLE, api.find_block(wrong[nth], block, &found));
    REFUSED(INVALID_HANDLE, api.shrink(wrong[nth], 0, 0, NULL));
    REFUSED(INVALID_HANDLE, api.set_limit(wrong[nth], 0, 0));
    REFUSED(INVALID_HANDLE, api.set_default(wrong[nth]));
    REFUSED(INVALID_HANDLE, api.close(wrong[nth]));
  }
  for (int nth = 0; nth < 4; nth++) {
    const int wrong[] = {-1, 128, INT32_MAX, INT32_MIN};
    REFUSED(INVALID_DEVICE, api.alloc(allocator, wrong[nth], 1, 0, one, &other));
    REFUSED(INVALID_DEVICE, api.free(allocator, wrong[nth], block, one));
    REFUSED(INVALID_DEVICE, api.record_use(allocator, wrong[nth], block, one));
    REFUSED(INVALID_DEVICE, api.end_stream(allocator, wrong[nth], one));
    REFUSED(INVALID_DEVICE, api.set_limit(allocator, wrong[nth], 0));
  }
  REFUSED(INVALID_DEVICE, api.shrink(allocator, -2, 0, NULL));
  REFUSED(INVALID_DEVICE, api.shrink(allocator, 128, 0, NULL));
  REFUSED(INVALID_ARGUMENT, api.alloc(allocator, 0, 1, 3, one, &other));
  REFUSED(INVALID_ARGUMENT, api.alloc(allocator, 0, 1, (size_t)1 << 40, one, &other));
  REFUSED(INVALID_ARGUMENT, api.alloc(allocator, 0, 1, SIZE_MAX, one, &other));
  REFUSED(INTERIOR_ADDRESS, api.free(allocator, 0, (char *)block + 1, one));
  REFUSED(FOREIGN_ADDRESS, api.free(allocator, 0, &block, one));
  REFUSED(FOREIGN_ADDRESS, api.free(allocator, 0, (void *)UINTPTR_MAX, one));
  REFUSED(FOREIGN_ADDRESS, api.free(allocator, 5, block, one));
  REFUSED(FOREIGN_ADDRESS, api.find_block(allocator, &block, &found));
  if (backend == LOWTIDE_BACKEND_CUDA) {
    REFUSED(INVALID_DEVICE, api.alloc(allocator, 99, 1, 0, NULL, &other));
  }
  CHECK(!other && !strcmp(api.status_name(12345), "unknown status"));
  CHECK(!strcmp(api.status_name(LOWTIDE_STATUS_NOT_LIVE), "LOWTIDE_STATUS_NOT_LIVE"));
  lowtide_allocator second = opened(0);
  REFUSED(FOREIGN_ADDRESS, api.free(second, 0, block, one));
  CHECK(api.close(second) == LOWTIDE_STATUS_OK);
  CHECK(api.free(allocator, 0, block, one) == LOWTIDE_STATUS_OK);
  CHECK(api.close(allocator) == LOWTIDE_STATUS_OK);
}

/* Work on the second stream uses a block of the first, in each way to say so: the next block in its
 * place keeps what the first stream wrote to it. */
static void orders(void) {
  const size_t size = 3 << 20;
  for (int way = 0; memset_async && way < 4; way++) {
    lowtide_allocator allocator = opened(4 << 20);
    void *block = taken(allocator, size, one);
    CHECK(memset_async((uintptr_t)block, 2, size, two) == 0);
    if (way == 0) CHECK(api.record_use(allocator, 0, block, two) == LOWTIDE_STATUS_OK);
    if (way == 1) CHECK(api.record_use(allocator, 0, block, api.any_stream()) == LOWTIDE_STATUS_OK);
    lowtide_stream frees[] = {one, one, two, api.any_stream()};
    CHECK(api.free(allocator, 0, block, frees[way]) == LOWTIDE_STATUS_OK);
    void *next = taken(allocator, size, one);
    CHECK(next == block && stream_synchronize(one) == 0 && synchronize() == 0);
    unsigned char byte = 0;
    CHECK(read_back(&byte, (uintptr_t)next + size - 1, 1) == 0);
    if (byte != 1) {
      fprintf(stderr, "way %d: the second stream wrote to it later\n", way);
      exit(1);
    }
    CHECK(api.free(allocator, 0, next, one) == LOWTIDE_STATUS_OK);
    CHECK(api.close(allocator) == LOWTIDE_STATUS_OK);
  }
}

/* As PyTorch and ONNX Runtime call it. */
static void engines(void) {
  lowtide_allocator allocator = opened(0), again = 0;
  CHECK(api.set_default(allocator) == LOWTIDE_STATUS_OK);
  CHECK(api.set_default(allocator) == LOWTIDE_STATUS_OK);
  CHECK(api.get_default(&again) == LOWTIDE_STATUS_OK && again == allocator);
  lowtide_allocator second = opened(0);
  REFUSED(DEFAULT_IS_SET, api.set_default(second));
  CHECK(api.close(second) == LOWTIDE_STATUS_OK);
  char *tensor = api.torch_alloc(5000, 0, one);
  CHECK(tensor && figures(allocator).live_blocks == 1);
  size_t size = 0;
  CHECK(api.torch_base_alloc(tensor + 4999, &size) == tensor && size == 5120);
  CHECK(api.torch_base_alloc(tensor, NULL) == tensor);
  api.torch_record_stream(tensor + 100, two);
  api.torch_free(tensor, 5000, 0, one);
  CHECK(!api.torch_alloc(0, 0, one) && !api.torch_alloc(-1, 0, one));
  CHECK(strstr(api.last_error(), "`size` is -1: expected 0 or more"));
  uint64_t failed = figures(allocator).failed_calls_total;
  api.torch_free(NULL, 0, 0, one);
  api.torch_record_stream(NULL, one);
  CHECK(figures(allocator).failed_calls_total == failed);
  api.torch_free(tensor, 5000, 0, one);
  api.torch_record_stream(tensor, one);
  CHECK(!api.torch_base_alloc(tensor, &size));
  CHECK(figures(allocator).failed_calls_total == failed + 3);
  api.torch_memory_fraction(2.0, 0);
  CHECK(figures(allocator).failed_calls_total == failed + 4);
  api.torch_memory_fraction(0.5, 0);
  CHECK(figures(allocator).failed_calls_total == failed + 4);
  /* The host has no memory of its own to take a share of. */
  CHECK(!memset_async || figures(allocator).limit_bytes < UINT64_MAX);
  api.torch_empty_cache();
  CHECK(figures(allocator).committed_bytes == 0);
  void *unbound = api.ort_alloc(100);
  CHECK(unbound && !api.ort_alloc(0));
  CHECK(api.ort_bind(0, one) == LOWTIDE_STATUS_OK);
  void *bound = api.ort_alloc(100);
  CHECK(api.ort_bind(1, NULL) == LOWTIDE_STATUS_OK);
  void *elsewhere = api.ort_alloc(100);
  lowtide_block found = {.struct_size = sizeof found};
  CHECK(api.find_block(allocator, elsewhere, &found) == LOWTIDE_STATUS_OK && found.device == 1);
  REFUSED(INVALID_DEVICE, api.ort_bind(-1, NULL));
  CHECK(bound && elsewhere && figures(allocator).live_blocks == 3);
  failed = figures(allocator).failed_calls_total;
  api.ort_free(unbound), api.ort_free(bound), api.ort_free(elsewhere), api.ort_free(NULL);
  CHECK(figures(allocator).failed_calls_total == failed && figures(allocator).live_blocks == 0);
  api.ort_free(bound);
  CHECK(figures(allocator).failed_calls_total == failed + 1);
  api.ort_empty_cache();
  CHECK(figures(allocator).committed_bytes == 0);
  CHECK(api.close(allocator) == LOWTIDE_STATUS_OK);
}

int main(int count, char **arguments) {
  if (count > 2) {
    start_cuda(arguments[2]);
  } else {
    one = (lowtide_stream)(uintptr_t)100, two = (lowtide_stream)(uintptr_t)200;
  }
  find(count > 1 ? arguments[1] : NULL);
  CHECK(api.abi_version() == (LOWTIDE_ABI_MAJOR << 16 | LOWTIDE_ABI_MINOR));
  blocks();
  limits();
  refusals();
  orders();
  engines();
  puts("held");
  return 0;
}
