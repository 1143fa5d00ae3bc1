/* The headers as files: included twice and in either order, in two translation units, one with the
 * implementation and one with a static copy of its own (header_second.c). */
#define KDA_IMPLEMENTATION
#define ATTNRES_IMPLEMENTATION
#include "../attnres.h"
#include "../kda.h"
/* again, in the other order */
#include "../kda.h"
#include "../attnres.h"

#include "test.h"

/* header_second.c */
float second_extern_exp(float x);
float second_static_exp(float x);
const char *second_attnres_name(int result);

static void two_translation_units(void) {
    float here = kda_exp(-1.5f), linked = second_extern_exp(-1.5f), own = second_static_exp(-1.5f);
    CHECK(memcmp(&here, &linked, sizeof here) == 0);
    CHECK(memcmp(&here, &own, sizeof here) == 0);
    CHECK(strcmp(second_attnres_name(ATTNRES_OK), "ATTNRES_OK") == 0);
}

static void versions(void) {
    CHECK(KDA_VERSION_MAJOR >= 0 && KDA_VERSION_MINOR >= 0 && KDA_VERSION_PATCH >= 0);
    CHECK(ATTNRES_VERSION_MAJOR >= 0 && ATTNRES_VERSION_MINOR >= 0 && ATTNRES_VERSION_PATCH >= 0);
}

int main(void) {
    TEST(two_translation_units);
    TEST(versions);
    return test_summary();
}
