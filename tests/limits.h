/* limits.h - for tests of a process that lacks something: the system's limits, set for a while. */
#ifndef TEST_LIMITS_H
#define TEST_LIMITS_H

#include "test.h"

#include <sys/resource.h>

/* Sets what is allowed until it is set again; what it was. */
static inline rlim_t set_limit(int resource, rlim_t allowed) {
    struct rlimit limit;
    if (getrlimit(resource, &limit) != 0) exit(2);
    rlim_t before = limit.rlim_cur;
    limit.rlim_cur = allowed;
    if (setrlimit(resource, &limit) != 0) exit(2);
    return before;
}

#endif
