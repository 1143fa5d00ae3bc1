/* draft.h - guesses of the next tokens from the tokens so far: what followed the last time.
 *
 * A cheap drafter for speculative decoding. It looks for the latest earlier place where the last
 * tokens stand too, as many of them as possible, and proposes what came after. It knows nothing of
 * the model: whoever verifies decides.
 *
 * Every function is static.
 */
#ifndef DRAFT_H
#define DRAFT_H

#include <stddef.h>
#include <stdint.h>

#define DRAFT_SHORTEST 2 /* tokens that must agree */
#define DRAFT_LONGEST 16 /* more than these are not compared */

/* How many of the last tokens before `end` are those before n, up to DRAFT_LONGEST. */
static inline size_t drafti_agreement(const uint32_t *ids, size_t n, size_t end) {
    size_t length = 0;
    while (length < DRAFT_LONGEST && length < end && ids[end - 1 - length] == ids[n - 1 - length])
        length++;
    return length;
}

/* Proposes at most `most` tokens to follow ids[n]; returns how many, 0 where nothing agrees. Takes
 * time in proportion to n. */
static inline size_t draft_ngram(const uint32_t *ids, size_t n, size_t most, uint32_t *proposed) {
    size_t best = DRAFT_SHORTEST - 1, from = 0, count = 0;
    for (size_t end = n; end-- > 1 && best < DRAFT_LONGEST;) {
        size_t length = drafti_agreement(ids, n, end);
        if (length > best) best = length, from = end;
    }
    /* The text may run into its own repetition: what is proposed counts as read. */
    for (; from > 0 && count < most; count++)
        proposed[count] = from + count < n ? ids[from + count] : proposed[from + count - n];
    return count;
}

#endif
