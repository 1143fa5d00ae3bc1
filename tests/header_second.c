/* The second translation unit of test_header.c: declarations only, before any system header and
 * with min and max defined as macros, as some platforms do. */
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#include "../attnres.h"
#include "../kda.h"

float second_extern_exp(float x);
float second_static_exp(float x);
const char *second_attnres_name(int result);

float second_extern_exp(float x) {
    return kda_exp(x);
}

const char *second_attnres_name(int result) {
    return attnres_result_name((attnres_result)result);
}
