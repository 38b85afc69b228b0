/* Memory for a test process (LD_PRELOAD): each aligned allocation ends before a page without access.
 *
 * torch's CPU tensors come from posix_memalign. A kernel that reads or writes far past a tensor ends the process by
 * SIGSEGV. A write into the few bytes around a tensor, which alignment leaves, is found by `free`: it aborts. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

extern void __libc_free(void *);
extern void *__libc_memalign(size_t, size_t);

enum { PAGE = 4096, LARGEST = 1 << 20, NUM_BLOCKS = 1 << 14, MARK = 0xA5 };

typedef struct {
    unsigned char *data, *base, *guard;
    size_t size;
} Block;

static Block blocks[NUM_BLOCKS];
static long num_guarded;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

long num_guarded_allocations(void) { return num_guarded; }

static void check(const unsigned char *begin, const unsigned char *end) {
    for (; begin < end; ++begin) {
        if (*begin != MARK) {
            static const char text[] = "a tensor's neighbours were overwritten\n";
            (void)!write(2, text, sizeof text - 1);
            abort();
        }
    }
}

static Block *find(const void *data) {
    size_t place = ((uintptr_t)data / 64) % NUM_BLOCKS;
    for (int i = 0; i < 64; ++i) {
        Block *block = &blocks[(place + i) % NUM_BLOCKS];
        if (block->data == data) return block;
    }
    return NULL;
}

static Block *vacant(const void *data) {
    size_t place = ((uintptr_t)data / 64) % NUM_BLOCKS;
    for (int i = 0; i < 64; ++i) {
        Block *block = &blocks[(place + i) % NUM_BLOCKS];
        if (block->data == NULL) return block;
    }
    return NULL;
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (size > 0 && size <= LARGEST && alignment <= PAGE) {
        size_t total = (size + 2 * PAGE - 1) / PAGE * PAGE;
        unsigned char *base = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base != MAP_FAILED) {
            unsigned char *guard = base + total - PAGE;
            unsigned char *data = (unsigned char *)((uintptr_t)(guard - size) & ~(uintptr_t)(alignment - 1));
            pthread_mutex_lock(&mutex);
            Block *block = vacant(data);
            if (block != NULL) *block = (Block){data, base, guard, size}, ++num_guarded;
            pthread_mutex_unlock(&mutex);
            if (block != NULL && mprotect(guard, PAGE, PROT_NONE) == 0) {
                memset(base, MARK, data - base);
                memset(data + size, MARK, guard - data - size);
                *out = data;
                return 0;
            }
            munmap(base, total);
        }
    }
    *out = __libc_memalign(alignment, size);
    return *out == NULL ? 12 : 0;
}

void free(void *data) {
    if (data == NULL) return;
    pthread_mutex_lock(&mutex);
    Block *found = find(data), block = {0};
    if (found != NULL) block = *found, *found = (Block){0};
    pthread_mutex_unlock(&mutex);
    if (block.data == NULL) {
        __libc_free(data);
        return;
    }
    check(block.base, block.data);
    check(block.data + block.size, block.guard);
    munmap(block.base, block.guard + PAGE - block.base);
}
