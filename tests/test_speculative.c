/* test_speculative.c - the program: its drafts end where a serial run does, and what it counts is what
 * kda.h says of a journal. */
#define SAFETENSORS_IMPLEMENTATION
#include "../examples/safetensors.h"

#define PROGRAM "speculative"
#include "program.h"

static void steps_add_up(void) {
    outcome o = run_ok("");
    const char *line = strchr(o.out, '\n');
    size_t total = 0;
    CHECK(strncmp(o.out, "step  drafted  accepted  tokens\n", 32) == 0 && o.n_err == 0);
    for (size_t i = 1; line && i <= 12; i++, line = strchr(line + 1, '\n')) {
        size_t step = 0, drafted = 0, accepted = 0, tokens = 0;
        CHECK(sscanf(line, "%zu %zu %zu %zu", &step, &drafted, &accepted, &tokens) == 4);
        total += accepted;
        CHECK_MSG(step == i && drafted == 4 && accepted <= 4 && tokens == total, "%.40s", line);
    }
    CHECK(total > 0 && total < 12 * 4); /* some are accepted, some are not */
    /* Of a token k, u and the decays, of a state 128 x 128, in float32. */
    size_t journal = 0, state = 0;
    CHECK(line &&
          sscanf(line, " to undo a token, per head: journal %zu bytes, copy of the state %zu",
                 &journal, &state) == 2);
    CHECK_MSG(journal == 3 * 128 * 4 && state == 128 * 128 * 4, "%zu, %zu", journal, state);
    CHECK(strstr(o.out, "\noutputs, state and window equal the serial run's, bit for bit\n"));
    outcome_free(&o);
}

int main(void) {
    temporary(PROGRAM, work);
    TEST(steps_add_up);
    return test_summary();
}
