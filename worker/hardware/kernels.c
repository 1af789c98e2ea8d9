/* What Python cannot time honestly: loads that depend on each other, streams without temporaries, scalar loops.
 *
 * Compiled when first used by worker.hardware.native, which is the only caller. Nothing here allocates or prints.
 * Kernels that run on several cores are entered by one thread a core; they wait for each other at `gate`, a counter
 * that starts at 0, and note by the monotonic clock when each began and ended.
 */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* All threads arrive before any goes on; `target` grows by the number of threads each time. */
static void meet(int64_t *gate, int64_t target) {
    __atomic_add_fetch(gate, 1, __ATOMIC_ACQ_REL);
    for (int spins = 0; __atomic_load_n(gate, __ATOMIC_ACQUIRE) < target; spins++)
        if (spins > 10000) sched_yield(); /* under a CPU quota the others may have to run here */
}

/* STREAM (McCalpin): copy c = a, scale b = s c, add c = a + b, triad a = b + s c, in this order, `repeats` times, on
 * `n` doubles of this thread. begun and ended: repeats x 4. */
static void copy(double *restrict c, const double *restrict a, size_t n) {
    for (size_t i = 0; i < n; i++) c[i] = a[i];
}
static void scale(double *restrict b, const double *restrict c, double s, size_t n) {
    for (size_t i = 0; i < n; i++) b[i] = s * c[i];
}
static void add(double *restrict c, const double *restrict a, const double *restrict b, size_t n) {
    for (size_t i = 0; i < n; i++) c[i] = a[i] + b[i];
}
static void triad(double *restrict a, const double *restrict b, const double *restrict c, double s, size_t n) {
    for (size_t i = 0; i < n; i++) a[i] = b[i] + s * c[i];
}
void fill(double *a, double value, size_t n) {
    for (size_t i = 0; i < n; i++) a[i] = value;
}
void stream(double *a, double *b, double *c, double s, size_t n, int64_t repeats, int64_t threads, int64_t *gate,
            double *begun, double *ended) {
    int64_t target = 0;
    for (int64_t r = 0; r < repeats; r++)
        for (int kernel = 0; kernel < 4; kernel++) {
            meet(gate, target += threads);
            begun[4 * r + kernel] = now_s();
            if (kernel == 0) copy(c, a, n);
            if (kernel == 1) scale(b, c, s, n);
            if (kernel == 2) add(c, a, b, n);
            if (kernel == 3) triad(a, b, c, s, n);
            ended[4 * r + kernel] = now_s();
        }
}

/* Seconds of `steps` loads (a multiple of 8), each of which gives the place of the next; *at is where it stands. */
double chase(const uint64_t *next, uint64_t *at, uint64_t steps) {
    uint64_t i = *at;
    double begun = now_s();
    for (uint64_t left = steps / 8; left > 0; left--) {
        i = next[i]; i = next[i]; i = next[i]; i = next[i];
        i = next[i]; i = next[i]; i = next[i]; i = next[i];
    }
    *at = i;
    __asm__ volatile("" : : "r"(i) : "memory");
    return now_s() - begun;
}

/* Where so many such loads from 0 end; *sum is that of all places on the way. */
uint64_t walk(const uint64_t *next, uint64_t steps, uint64_t *sum) {
    uint64_t i = 0, total = 0;
    for (; steps > 0; steps--) { total += i; i = next[i]; }
    *sum = total;
    return i;
}

/* Seconds to add up `n` words (a multiple of 32) `repeats` times; *sum is their sum, each time. */
static uint64_t total(const uint64_t *p, size_t n) {
    uint64_t lanes[32] = {0}, sum = 0;
    for (size_t i = 0; i < n; i += 32)
        for (int k = 0; k < 32; k++) lanes[k] += p[i + k];
    for (int k = 0; k < 32; k++) sum += lanes[k];
    return sum;
}
double read_all(const uint64_t *p, size_t n, uint64_t repeats, uint64_t *sum) {
    double begun = now_s();
    for (uint64_t r = 0; r < repeats; r++) {
        *sum = total(p, n);
        __asm__ volatile("" : : : "memory");
    }
    return now_s() - begun;
}
/* The same backwards: from the last block to the first. */
double read_backwards(const uint64_t *p, size_t n, uint64_t *sum) {
    uint64_t lanes[32] = {0};
    double begun = now_s();
    for (size_t i = n; i > 0; i -= 32)
        for (int k = 31; k >= 0; k--) lanes[k] += p[i - 32 + k];
    *sum = 0;
    for (int k = 0; k < 32; k++) *sum += lanes[k];
    return now_s() - begun;
}
/* Seconds to read `count` bursts of `words` consecutive words (a multiple of 8) that begin at places[]. */
double read_bursts(const uint64_t *p, const uint64_t *places, size_t count, size_t words, uint64_t *sum) {
    uint64_t lanes[8] = {0};
    double begun = now_s();
    for (size_t j = 0; j < count; j++) {
        const uint64_t *burst = p + places[j];
        for (size_t i = 0; i < words; i += 8)
            for (int k = 0; k < 8; k++) lanes[k] += burst[i + k];
    }
    *sum = 0;
    for (int k = 0; k < 8; k++) *sum += lanes[k];
    return now_s() - begun;
}

/* y = a polynomial of degree 16 of x by Horner's rule, 32 FLOP an element: independent elements, so a compiler that may
 * use vectors does. */
double horner(const float *restrict x, float *restrict y, size_t n, uint64_t repeats) {
    double begun = now_s();
    for (uint64_t r = 0; r < repeats; r++) {
        for (size_t i = 0; i < n; i++) {
            float v = x[i], s = 0.5f;
            s = s * v + 0.25f; s = s * v + 0.5f; s = s * v + 0.25f; s = s * v + 0.5f;
            s = s * v + 0.25f; s = s * v + 0.5f; s = s * v + 0.25f; s = s * v + 0.5f;
            s = s * v + 0.25f; s = s * v + 0.5f; s = s * v + 0.25f; s = s * v + 0.5f;
            s = s * v + 0.25f; s = s * v + 0.5f; s = s * v + 0.25f; s = s * v + 0.5f;
            y[i] = s;
        }
        __asm__ volatile("" : : "r"(y) : "memory");
    }
    return now_s() - begun;
}

/* Seconds of `count` fused multiply-adds, each of which needs the one before. */
double fma_chain(double *value, double factor, double term, uint64_t count) {
    double x = *value, begun = now_s();
    for (uint64_t i = 0; i < count; i++) x = fma(x, factor, term);
    *value = x; /* before the clock is read: the caller could see it */
    __asm__ volatile("" : : : "memory");
    return now_s() - begun;
}

/* Seconds to branch once a byte of `choices`; the asm keeps either side a real branch. */
double branches(const uint8_t *choices, size_t n, uint64_t *taken) {
    uint64_t yes = 0, no = 0;
    double begun = now_s();
    for (size_t i = 0; i < n; i++) {
        if (choices[i]) { yes++; __asm__ volatile("" : "+r"(yes)); }
        else { no++; __asm__ volatile("" : "+r"(no)); }
    }
    *taken = yes;
    return now_s() - begun;
}

/* Seconds to take and give back a mutex that nobody else wants, `count` times. */
double mutexes(uint64_t count) {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    double begun = now_s();
    for (uint64_t i = 0; i < count; i++) {
        pthread_mutex_lock(&mutex);
        pthread_mutex_unlock(&mutex);
    }
    return now_s() - begun;
}

/* Keep up to `depth` of `count` prepared requests (struct iocb) in flight until all are done; each leaves one of
 * `events` (struct io_event, of `event_bytes`). 0, or the errno of a call that failed; after a submission that failed,
 * once nothing is in flight (after a wait that failed, io_destroy has to wait).
 * Submitted one by one: of several in one call the kernel holds back the first until it has seen the last. */
int64_t keep_in_flight(uint64_t context, int64_t depth, int64_t count, void **requests, char *events,
                       int64_t event_bytes) {
#if defined(SYS_io_submit) && defined(SYS_io_getevents)
    int64_t begun = 0, done = 0, failure = 0;
    while (failure == 0 ? done < count : done < begun) {
        if (begun - done < depth && begun < count && failure == 0) {
            long taken = syscall(SYS_io_submit, context, 1L, requests + begun);
            if (taken > 0) begun += taken;
            else if (taken < 0 && errno != EINTR) failure = errno;
            continue;
        }
        long ended = syscall(SYS_io_getevents, context, 1L, begun - done, events + done * event_bytes, NULL);
        if (ended > 0) done += ended;
        else if (ended < 0 && errno != EINTR) return errno;
    }
    return failure;
#else
    (void)context, (void)depth, (void)count, (void)requests, (void)events, (void)event_bytes;
    return ENOSYS;
#endif
}
