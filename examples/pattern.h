/* pattern.h - regular expressions over names, in time proportional to name and expression.
 *
 * In one source file of a program:
 *
 *     #define PATTERN_IMPLEMENTATION
 *     #include "pattern.h"
 *
 *     pattern p;
 *     if (!pattern_compile(&p, ".*self_attn.*", 13, &wrong)) ...
 *     if (pattern_matches(&p, "model.layers.0.self_attn.q_proj")) ...
 *
 * WHAT IS UNDERSTOOD
 *   The part of Python's `re` that names need: characters, `.`, sets ([a-z_], [^0-9]), \d \w \s and
 *   their opposites \D \W \S, a backslash before punctuation, groups (..) and (?:..), alternatives
 *   a|b, the repetitions * + ? {n} {n,} {n,m} (a ? behind them changes no answer and is allowed),
 *   ^ and $. Anything else is refused, never guessed.
 *   As re.match does, a pattern matches where it describes the beginning of the name.
 *
 * HOW
 *   The expression becomes a program of at most PATTERN_SIZE steps, all of whose ways through the
 *   name are followed side by side (Thompson 1968), so that no pattern is slow. A pattern that needs
 *   a certain text somewhere is first tried by looking for it.
 */
#ifndef PATTERN_H
#define PATTERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PATTERN_SIZE 400 /* steps, and bytes of the expression */

typedef enum patterni_kind {
    PATTERNI_SET,   /* a byte of set number x, then the next step */
    PATTERNI_SPLIT, /* the steps x and y further on, both */
    PATTERNI_JUMP,  /* the step x further on */
    PATTERNI_START, /* nothing, at the beginning of the name */
    PATTERNI_END,   /* nothing, at its end */
    PATTERNI_MATCH
} patterni_kind;

typedef struct patterni_step {
    uint8_t kind;
    int16_t x, y; /* relative, so that a part may be moved and copied */
} patterni_step;

/* Read through the functions below. */
typedef struct pattern {
    patterni_step steps[PATTERN_SIZE + 1];
    uint8_t sets[PATTERN_SIZE][32]; /* a bit for each byte */
    size_t n_steps, n_sets;
    char needle[64]; /* a text that every match holds; "" if none is known */
} pattern;

/* On failure *wrong is where in the expression, in bytes; it is its length if something is missing
 * at the end. */
bool pattern_compile(pattern *p, const char *text, size_t length, size_t *wrong);

bool pattern_matches(const pattern *p, const char *name);

#endif

#if defined(PATTERN_IMPLEMENTATION) && !defined(PATTERNI_IMPLEMENTED)
#define PATTERNI_IMPLEMENTED

#include <string.h>

/* ---- Reading the expression ---- */

#define PATTERNI_DEPTH 32 /* of groups in groups */

typedef struct patterni_reader {
    pattern *p;
    const char *at, *end;
    int depth;
} patterni_reader;

static bool patterni_alternatives(patterni_reader *r);

static bool patterni_next_is(const patterni_reader *r, char c) {
    return r->at < r->end && *r->at == c;
}

static bool patterni_take(patterni_reader *r, char c) {
    if (!patterni_next_is(r, c)) return false;
    r->at++;
    return true;
}

static bool patterni_emit(patterni_reader *r, patterni_kind kind, int x, int y) {
    if (r->p->n_steps >= PATTERN_SIZE) return false;
    patterni_step *step = &r->p->steps[r->p->n_steps++];
    step->kind = (uint8_t)kind, step->x = (int16_t)x, step->y = (int16_t)y;
    return true;
}

/* A step before those from `first` on. */
static bool patterni_insert(patterni_reader *r, size_t first, int x, int y) {
    pattern *p = r->p;
    if (!patterni_emit(r, PATTERNI_SPLIT, x, y)) return false;
    patterni_step step = p->steps[p->n_steps - 1];
    memmove(p->steps + first + 1, p->steps + first, (p->n_steps - 1 - first) * sizeof *p->steps);
    p->steps[first] = step;
    return true;
}

/* Each is for some of the expression's bytes, which are at most PATTERN_SIZE. */
static uint8_t *patterni_new_set(patterni_reader *r) {
    uint8_t *set = r->p->sets[r->p->n_sets];
    memset(set, 0, sizeof r->p->sets[0]);
    return patterni_emit(r, PATTERNI_SET, (int)r->p->n_sets++, 0) ? set : NULL;
}

static void patterni_add(uint8_t *set, unsigned first, unsigned last) {
    for (unsigned c = first; c <= last; c++) set[c / 8] |= (uint8_t)(1u << c % 8);
}

static void patterni_invert(uint8_t *set) {
    for (size_t i = 0; i < 32; i++) set[i] = (uint8_t)~set[i];
}

/* What a letter behind a backslash stands for; false for a letter that stands for nothing here. */
static bool patterni_add_class(uint8_t *set, char letter) {
    uint8_t class_set[32] = {0};
    char lower = (char)(letter | 0x20);
    if (lower == 'd' || lower == 'w') patterni_add(class_set, '0', '9');
    if (lower == 'w') {
        patterni_add(class_set, 'a', 'z'), patterni_add(class_set, 'A', 'Z');
        patterni_add(class_set, '_', '_');
    }
    if (lower == 's') patterni_add(class_set, '\t', '\r'), patterni_add(class_set, ' ', ' ');
    if (lower != 'd' && lower != 'w' && lower != 's') return false;
    if (letter != lower) patterni_invert(class_set);
    for (size_t i = 0; i < 32; i++) set[i] |= class_set[i];
    return true;
}

static bool patterni_is_alphanumeric(char c) {
    return (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z');
}

/* One character of a set, or a class, which begins no range. */
static bool patterni_set_member(patterni_reader *r, uint8_t *set, bool *is_class, unsigned *c) {
    *is_class = false;
    if (r->at == r->end || *r->at == '[') return false;
    if (patterni_take(r, '\\')) {
        if (r->at == r->end) return false;
        *is_class = patterni_add_class(set, *r->at);
        if (!*is_class && (patterni_is_alphanumeric(*r->at) || (unsigned char)*r->at >= 0x80))
            return false;
    }
    *c = (unsigned char)*r->at++;
    return true;
}

/* Behind "[". */
static bool patterni_set(patterni_reader *r) {
    uint8_t *set = patterni_new_set(r);
    if (!set) return false;
    bool inverted = patterni_take(r, '^'), first = true, is_class;
    for (; first || !patterni_next_is(r, ']'); first = false) {
        unsigned low, high;
        if (!patterni_set_member(r, set, &is_class, &low)) return false;
        if (is_class) continue;
        high = low;
        if (r->end - r->at >= 2 && r->at[0] == '-' && r->at[1] != ']') {
            r->at++;
            if (!patterni_set_member(r, set, &is_class, &high) || is_class || high < low)
                return false;
        }
        patterni_add(set, low, high);
    }
    r->at++;
    if (inverted) patterni_invert(set);
    return true;
}

/* Behind "(". */
static bool patterni_group(patterni_reader *r) {
    if (patterni_take(r, '?') && !patterni_take(r, ':')) return false;
    if (r->depth >= PATTERNI_DEPTH) return false;
    r->depth++;
    bool ok = patterni_alternatives(r) && patterni_take(r, ')');
    r->depth--;
    return ok;
}

/* A part that can be repeated. */
static bool patterni_atom(patterni_reader *r) {
    char c = *r->at;
    if (c == '\\' && (r->end - r->at < 2 || (unsigned char)r->at[1] >= 0x80)) return false;
    if (strchr("*+?{})]", c)) return false;
    r->at++;
    if (c == '(') return patterni_group(r);
    if (c == '[') return patterni_set(r);
    if (c == '^') return patterni_emit(r, PATTERNI_START, 0, 0);
    if (c == '$') return patterni_emit(r, PATTERNI_END, 0, 0);
    uint8_t *set = patterni_new_set(r);
    if (!set) return false;
    if (c == '.') {
        patterni_add(set, 0, 255);
        set['\n' / 8] &= (uint8_t) ~(1u << '\n' % 8);
    } else if (c != '\\') {
        patterni_add(set, (unsigned char)c, (unsigned char)c);
    } else if (!patterni_add_class(set, *r->at)) {
        if (patterni_is_alphanumeric(*r->at)) return false;
        patterni_add(set, (unsigned char)*r->at, (unsigned char)*r->at);
        r->at++;
    } else {
        r->at++;
    }
    return true;
}

static bool patterni_number(patterni_reader *r, int *n) {
    const char *start = r->at;
    for (*n = 0; r->at < r->end && *r->at >= '0' && *r->at <= '9'; r->at++)
        if ((*n = *n * 10 + (*r->at - '0')) > PATTERN_SIZE) return false;
    return r->at > start;
}

/* {low,high} of the part from `first` on; high -1: without end. */
static bool patterni_repeat(patterni_reader *r, size_t first, int low, int high) {
    pattern *p = r->p;
    patterni_step part[PATTERN_SIZE];
    size_t count = p->n_steps - first;
    memcpy(part, p->steps + first, count * sizeof *part);
    p->n_steps = first;
    for (int i = 0; i < low || i < high || (high < 0 && i == low); i++) {
        size_t start = p->n_steps;
        if (start + count > PATTERN_SIZE) return false;
        memcpy(p->steps + start, part, count * sizeof *part);
        p->n_steps += count;
        if (i < low) continue;
        bool loops = high < 0;
        if (!patterni_insert(r, start, 1, (int)count + (loops ? 2 : 1))) return false;
        if (loops && !patterni_emit(r, PATTERNI_JUMP, -(int)count - 1, 0)) return false;
    }
    return true;
}

/* What stands behind a part, if it is a repetition. */
static bool patterni_repetition(patterni_reader *r, size_t first) {
    int low = 0, high = -1;
    if (patterni_take(r, '?')) {
        high = 1;
    } else if (patterni_take(r, '+')) {
        low = 1;
    } else if (patterni_take(r, '{')) {
        if (!patterni_number(r, &low)) return false;
        high = low;
        if (patterni_take(r, ',')) {
            high = -1;
            if (!patterni_next_is(r, '}') && (!patterni_number(r, &high) || high < low))
                return false;
        }
        if (!patterni_take(r, '}')) return false;
    } else if (!patterni_take(r, '*')) {
        return true;
    }
    patterni_take(r, '?');
    return patterni_repeat(r, first, low, high);
}

static bool patterni_sequence(patterni_reader *r) {
    while (r->at < r->end && *r->at != '|' && *r->at != ')') {
        size_t first = r->p->n_steps;
        if (!patterni_atom(r) || !patterni_repetition(r, first)) return false;
    }
    return true;
}

/* split, what was read so far, jump over the next alternative, that */
static bool patterni_alternatives(patterni_reader *r) {
    size_t first = r->p->n_steps;
    if (!patterni_sequence(r)) return false;
    while (patterni_take(r, '|')) {
        size_t count = r->p->n_steps - first;
        if (!patterni_insert(r, first, 1, (int)count + 2)) return false;
        size_t jump = r->p->n_steps;
        if (!patterni_emit(r, PATTERNI_JUMP, 0, 0) || !patterni_sequence(r)) return false;
        r->p->steps[jump].x = (int16_t)(r->p->n_steps - jump);
    }
    return true;
}

/* Takes the run over if it is the longest. */
static void patterni_keep_run(pattern *p, const char *run, size_t n) {
    if (n > strlen(p->needle)) memcpy(p->needle, run, n), p->needle[n] = '\0';
}

/* The longest run of plain characters that are outside groups and not repeated, in an expression
 * that was understood; none where it has alternatives outside groups, or sets. */
static void patterni_find_needle(pattern *p, const char *text, size_t length) {
    char run[sizeof p->needle];
    size_t n = 0, depth = 0;
    p->needle[0] = '\0';
    for (size_t i = 0; i < length; i++) {
        char c = text[i];
        bool escaped = c == '\\', plain = !strchr(".*+?{}()|^$", c);
        if (c == '[' || (c == '|' && depth == 0)) {
            p->needle[0] = '\0';
            return;
        }
        if (escaped) c = text[++i], plain = !patterni_is_alphanumeric(c);
        if (plain && depth == 0 && n + 1 < sizeof run) {
            run[n++] = c;
            continue;
        }
        if (!escaped && strchr("*?{", c) && n > 0) n--; /* it may be absent */
        patterni_keep_run(p, run, n);
        n = 0;
        if (escaped) continue;
        if (c == '(') depth++;
        if (c == ')') depth--;
        while (c == '{' && text[i] != '}') i++;
    }
    patterni_keep_run(p, run, n);
}

bool pattern_compile(pattern *p, const char *text, size_t length, size_t *wrong) {
    patterni_reader r = {p, text, text + length, 0};
    p->n_steps = p->n_sets = 0;
    bool ok = length <= PATTERN_SIZE && !memchr(text, '\0', length) && patterni_alternatives(&r) &&
              r.at == r.end;
    if (!ok) {
        *wrong = (size_t)(r.at - text);
        return false;
    }
    p->steps[p->n_steps++].kind = PATTERNI_MATCH;
    patterni_find_needle(p, text, length);
    return true;
}

/* ---- Following it ---- */

/* The steps that a name has come to: those that wait for a byte, each once. */
typedef struct patterni_ways {
    uint16_t step[PATTERN_SIZE + 1];
    size_t n;
} patterni_ways;

/* Step `first` and what follows it without a byte. True if that is the end of a match. */
static bool patterni_follow(const pattern *p, size_t first, bool at_start, bool at_end, bool *seen,
                            patterni_ways *ways) {
    uint16_t stack[2 * (PATTERN_SIZE + 1)];
    size_t n = 0;
    stack[n++] = (uint16_t)first;
    while (n > 0) {
        size_t i = stack[--n];
        const patterni_step *step = &p->steps[i];
        if (seen[i]) continue;
        seen[i] = true;
        switch ((patterni_kind)step->kind) {
        case PATTERNI_MATCH: return true;
        case PATTERNI_SET: ways->step[ways->n++] = (uint16_t)i; break;
        case PATTERNI_SPLIT:
            stack[n++] = (uint16_t)((int)i + step->x);
            stack[n++] = (uint16_t)((int)i + step->y);
            break;
        case PATTERNI_JUMP: stack[n++] = (uint16_t)((int)i + step->x); break;
        case PATTERNI_START:
            if (at_start) stack[n++] = (uint16_t)(i + 1);
            break;
        case PATTERNI_END:
            if (at_end) stack[n++] = (uint16_t)(i + 1);
            break;
        }
    }
    return false;
}

bool pattern_matches(const pattern *p, const char *name) {
    patterni_ways ways[2];
    bool seen[PATTERN_SIZE + 1];
    size_t now = 0;
    if (!strstr(name, p->needle)) return false;
    memset(seen, 0, p->n_steps * sizeof *seen);
    ways[0].n = 0;
    if (patterni_follow(p, 0, true, *name == '\0', seen, &ways[0])) return true;
    for (; *name && ways[now].n > 0; name++, now = !now) {
        patterni_ways *next = &ways[!now];
        unsigned c = (unsigned char)*name;
        memset(seen, 0, p->n_steps * sizeof *seen);
        next->n = 0;
        for (size_t i = 0; i < ways[now].n; i++) {
            size_t step = ways[now].step[i];
            if (!(p->sets[p->steps[step].x][c / 8] >> c % 8 & 1)) continue;
            if (patterni_follow(p, step + 1, false, name[1] == '\0', seen, next)) return true;
        }
    }
    return false;
}

#endif
