/* A disk that fails: preload this library, and write "CALL ERRNO PART-OF-PATH" into the file that FAILING_DISK names. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char control[4096]; /* read once: other threads change the environment */

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAILING_DISK");
    if (path) snprintf(control, sizeof control, "%s", path);
}

/* Signal handlers write, too, on a stack of a few KiB, so large buffers are not on the stack. */
static int fails(const char *call, const char *path) {
    static __thread char text[4096], name[32], part[3072];
    int number, before = errno;
    if (!control[0]) return 0;
    long file = syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC);
    if (file < 0) { errno = before; return 0; }
    long length = syscall(SYS_read, file, text, sizeof text - 1);
    syscall(SYS_close, file);
    errno = before;
    if (length <= 0) return 0;
    text[length] = 0;
    if (sscanf(text, "%31s %d %3071s", name, &number, part) != 3) return 0;
    if (strcmp(name, call) || !strstr(path, part)) return 0;
    errno = number;
    return 1;
}

static int fails_at(const char *call, int file) {
    static __thread char link[64], path[4096];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    long length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return fails(call, path);
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int mode = va_arg(more, int);
    va_end(more);
    REAL(open64);
    return fails("open", path) ? -1 : real(path, flags, mode);
}

DIR *opendir(const char *path) {
    REAL(opendir);
    return fails("opendir", path) ? NULL : real(path);
}

struct dirent64 *readdir64(DIR *folder) {
    REAL(readdir64);
    return fails_at("readdir", dirfd(folder)) ? NULL : real(folder);
}

ssize_t preadv64v2(int file, const struct iovec *parts, int count, off64_t offset, int flags) {
    REAL(preadv64v2);
    return fails_at("read", file) ? -1 : real(file, parts, count, offset, flags);
}

ssize_t write(int file, const void *data, size_t length) {
    REAL(write);
    return fails_at("write", file) ? -1 : real(file, data, length);
}

int fsync(int file) {
    REAL(fsync);
    return fails_at("fsync", file) ? -1 : real(file);
}
