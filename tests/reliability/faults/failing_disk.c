/* A disk on which some calls for some files fail with EIO. Loaded with LD_PRELOAD into a process that knows nothing of it.
 *
 * FORGE_TEST_EIO has entries of the form "call part part", with ";" between them: a call fails when the path of its file
 * has all these parts; one that ends in "$" has to be at its end. Calls are open, read, write, fsync, rename (by its old
 * path) and stat.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int has(const char *path, const char *part) {
    size_t length = strlen(part), all = strlen(path);
    if (part[length - 1] != '$')
        return strstr(path, part) != NULL;
    return all >= length - 1 && strncmp(path + all - (length - 1), part, length - 1) == 0;
}

static int fails(const char *call, const char *path) {
    const char *entries = getenv("FORGE_TEST_EIO");
    if (entries == NULL || path == NULL)
        return 0;
    char copy[4096], *next_entry, *next_part;
    snprintf(copy, sizeof copy, "%s", entries);
    for (char *entry = strtok_r(copy, ";", &next_entry); entry; entry = strtok_r(NULL, ";", &next_entry)) {
        char *part = strtok_r(entry, " ", &next_part);
        if (part == NULL || strcmp(part, call) != 0)
            continue;
        int has_all = 1;
        while ((part = strtok_r(NULL, " ", &next_part)))
            has_all = has_all && has(path, part);
        if (has_all) {
            errno = EIO;
            return 1;
        }
    }
    return 0;
}

static int fails_open_file(const char *call, int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = '\0';
    return fails(call, path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;                                                      \
        va_end(more);                                                                                                  \
        return fails("open", path) ? -1 : NEXT(name)(path, flags, mode);                                               \
    }
OPEN(open)
OPEN(open64)

ssize_t read(int file, void *to, size_t length) {
    return fails_open_file("read", file) ? -1 : NEXT(read)(file, to, length);
}

/* What Python's os.preadv calls, on x86-64 and elsewhere. */
ssize_t preadv64v2(int file, const struct iovec *to, int n, off64_t offset, int flags) {
    return fails_open_file("read", file) ? -1 : NEXT(preadv64v2)(file, to, n, offset, flags);
}

ssize_t preadv2(int file, const struct iovec *to, int n, off_t offset, int flags) {
    return fails_open_file("read", file) ? -1 : NEXT(preadv2)(file, to, n, offset, flags);
}

ssize_t write(int file, const void *from, size_t length) {
    return fails_open_file("write", file) ? -1 : NEXT(write)(file, from, length);
}

int fsync(int file) { return fails_open_file("fsync", file) ? -1 : NEXT(fsync)(file); }

int rename(const char *old, const char *new) { return fails("rename", old) ? -1 : NEXT(rename)(old, new); }

#define STAT(name, result)                                                                                             \
    int name(const char *path, struct result *into) { return fails("stat", path) ? -1 : NEXT(name)(path, into); }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)
