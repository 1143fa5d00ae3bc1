/* The third: a static copy of both libraries beside the extern ones. */
#define KDA_STATIC
#define KDA_IMPLEMENTATION
#define ATTNRES_STATIC
#define ATTNRES_IMPLEMENTATION
#include "../kda.h"
#include "../attnres.h"

float second_static_exp(float x);

float second_static_exp(float x) {
    return kda_exp(x);
}
