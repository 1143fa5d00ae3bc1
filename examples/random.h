/* random.h - a small generator: the same numbers everywhere from the same seed.
 *
 * xorshift64*, by Marsaglia and Vigna. For samples and experiments, not for secrets.
 */
#ifndef RANDOM_H
#define RANDOM_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

typedef struct random_state {
    uint64_t bits; /* never 0 */
} random_state;

static inline random_state random_seed(uint64_t seed) {
    random_state r = {seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u};
    if (r.bits == 0) r.bits = 1;
    return r;
}

/* In [0, 1). */
static inline double random_uniform(random_state *r) {
    r->bits ^= r->bits >> 12;
    r->bits ^= r->bits << 25;
    r->bits ^= r->bits >> 27;
    return (double)(r->bits * 0x2545F4914F6CDD1Du >> 11) * 0x1p-53;
}

/* One of 0 .. n - 1; n > 0. */
static inline size_t random_below(random_state *r, size_t n) {
    return (size_t)(random_uniform(r) * (double)n);
}

/* Normal with variance 1 (Box and Muller). */
static inline double random_normal(random_state *r) {
    double radius = sqrt(-2 * log(1 - random_uniform(r)));
    return radius * cos(6.283185307179586 * random_uniform(r));
}

#endif
