/* kda.c - kda.h as one object, for the tests that use it from outside. */
#define KDA_IMPLEMENTATION
#include "../kda.h"
