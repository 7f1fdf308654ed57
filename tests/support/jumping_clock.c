/* Preloaded: the wall clock of a process is the kernel's and as many seconds as the file CLOCK_OFFSET holds, at all times.
   Other clocks stay, as they do where a real one jumps. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *offset_s;
static int (*kernels)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *offset_s, PROT_READ, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED)
        _exit(97); /* a test that changes no clock proves nothing */
    close(file);
    offset_s = mapped;
    kernels = dlsym(RTLD_NEXT, "clock_gettime");
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!kernels)
        begin();
    int code = kernels(clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *offset_s;
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec wall;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &wall);
    now->tv_sec = wall.tv_sec;
    now->tv_usec = wall.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    if (now)
        *now = wall.tv_sec;
    return wall.tv_sec;
}
