/* depth.h - how a model's layers build on each other: the size of the running sum, and what each
 * sub-layer reads where Attention Residuals replace residual additions. As text, and as a picture.
 *
 * Every function is static.
 */
#ifndef DEPTH_H
#define DEPTH_H

#include "hybrid.h"
#include "output.h"
#include "svg.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* What a model computed of some tokens. */
typedef struct depth_report {
    const hybrid_config *config;
    size_t n_tokens;
    const float *hidden;  /* [layers + 1][n_tokens][hidden_size], as hybrid_want's */
    const float *weights; /* [2 layers + 1][n_tokens][hybrid_depth_sources], as hybrid_want's depth;
                             null with plain residuals */
} depth_report;

/* Prints both to standard output. */
static inline bool depth_print(const depth_report *report, error *e);

/* Draws them into an SVG file. */
static inline bool depth_draw(const depth_report *report, const char *path, error *e);

/* Root of the mean square over tokens and channels of the running sum, after layer l (from 1), or
 * of the embedding (0). */
static double depthi_rms(const depth_report *r, size_t l) {
    size_t n = r->n_tokens * r->config->hidden_size;
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        double x = (double)r->hidden[l * n + i];
        sum += x * x;
    }
    return sqrt(sum / (double)n);
}

/* The mean over tokens of what mixture `read` gives source j. */
static double depthi_weight(const depth_report *r, size_t read, size_t j) {
    size_t sources = hybrid_depth_sources(r->config);
    const float *weights = r->weights + read * r->n_tokens * sources;
    double sum = 0;
    for (size_t t = 0; t < r->n_tokens; t++) sum += (double)weights[t * sources + j];
    return sum / (double)r->n_tokens;
}

/* Sources of a mixture. The attention that begins a block reads the sum before it as the last. */
static size_t depthi_sources_of(const hybrid_config *c, size_t read) {
    size_t block = 2 * c->attn_res_block_size;
    return read / block + (read % block != 0) + 1;
}

static void depthi_print_weights(const depth_report *r) {
    static const char shades[] = " .:-=+*#%@";
    const hybrid_config *c = r->config;
    size_t sources = hybrid_depth_sources(c);
    printf(
        "What each sub-layer reads, mean weight over %zu tokens. Source 0 is the embedding,\n"
        "source j the sum of block j, %zu layers; the last one of a row is the running sum.\n\n"
        "layer  sub-layer     %*s",
        r->n_tokens, c->attn_res_block_size, (int)(2 * sources + 2), "");
    for (size_t j = 0; j < sources; j++) printf("  %5zu", j);
    for (size_t read = 0; read <= 2 * c->n_layers; read++) {
        size_t n = depthi_sources_of(c, read);
        const char *what = read % 2 ? "feed-forward" : "attention";
        if (read < 2 * c->n_layers)
            printf("\n%5zu  %-12s  |", read / 2 + 1, what);
        else
            printf("\n       %-12s  |", "output");
        for (size_t j = 0; j < sources; j++) {
            double weight = j < n ? depthi_weight(r, read, j) : 0;
            char shade = shades[weight > 0 ? (size_t)fmin(9, weight * 10) : 0];
            printf("%c%c", shade, shade);
        }
        printf("|");
        for (size_t j = 0; j < n; j++) printf("  %5.3f", depthi_weight(r, read, j));
    }
    printf("\n\n");
}

static inline bool depth_print(const depth_report *report, error *e) {
    const hybrid_config *c = report->config;
    size_t block = c->attn_res_block_size ? c->attn_res_block_size : 1;
    double first = depthi_rms(report, block < c->n_layers ? block : c->n_layers);
    double last = depthi_rms(report, c->n_layers / block * block);
    if (report->weights) depthi_print_weights(report);
    printf("Root mean square of the running sum%s:\n\nlayer    RMS\nembed  %6.3f",
           report->weights ? ", which begins anew with each block" : "", depthi_rms(report, 0));
    for (size_t l = 1; l <= c->n_layers; l++)
        printf("\n%5zu  %6.3f%s", l, depthi_rms(report, l),
               report->weights && l % block == 0 ? "  end of a block" : "");
    if (c->n_layers >= block)
        printf("\n\n%s: %.2f times the first\n",
               report->weights ? "The last block's sum" : "The last layer's sum", last / first);
    return output_flush_standard(e);
}

/* Numbers of a picture: [lines][points]. */
typedef struct depthi_numbers {
    double *x, *y;
    svg_line *lines;
    char (*names)[32];
} depthi_numbers;

static void depthi_draw_weights(const depth_report *r, const depthi_numbers *m, svg *s) {
    size_t sources = hybrid_depth_sources(r->config), reads = 2 * r->config->n_layers + 1;
    svg_chart chart;
    memset(&chart, 0, sizeof chart);
    for (size_t read = 0; read < reads; read++) m->x[read] = (double)read / 2 + 1;
    for (size_t j = 0; j < sources; j++) {
        double *y = m->y + j * reads;
        for (size_t read = 0; read < reads; read++) /* what is no source yet is no point */
            y[read] =
                j < depthi_sources_of(r->config, read) ? depthi_weight(r, read, j) : (double)NAN;
        snprintf(m->names[j], sizeof m->names[j], j ? "block %zu" : "embedding", j);
        svg_line line = {m->names[j], m->x, y, reads, SVG_SOLID};
        m->lines[j] = line;
    }
    chart.title = "Mean weight of each source";
    chart.x.label = "layer: attention, and at .5 feed-forward", chart.y.label = "weight";
    chart.lines = m->lines, chart.n_lines = sources;
    svg_draw(s, &chart, 0, 380, 640, 380);
}

static void depthi_draw_sums(const depth_report *r, const depthi_numbers *m, svg *s) {
    size_t n = r->config->n_layers + 1;
    svg_chart chart;
    memset(&chart, 0, sizeof chart);
    for (size_t l = 0; l < n; l++) m->x[l] = (double)l, m->y[l] = depthi_rms(r, l);
    svg_line line = {NULL, m->x, m->y, n, SVG_SOLID};
    m->lines[0] = line;
    chart.title = "Running sum after each layer";
    chart.x.label = "layer (0: the embedding)", chart.y.label = "root mean square";
    chart.lines = m->lines, chart.n_lines = 1;
    svg_draw(s, &chart, 0, 0, 640, 380);
}

static inline bool depth_draw(const depth_report *report, const char *path, error *e) {
    size_t sources = hybrid_depth_sources(report->config) + 1;
    size_t points = 2 * report->config->n_layers + 1;
    depthi_numbers m;
    svg s;
    m.x = (double *)malloc(points * sizeof *m.x);
    m.y = (double *)malloc(sources * points * sizeof *m.y);
    m.lines = (svg_line *)malloc(sources * sizeof *m.lines);
    m.names = (char(*)[32])malloc(sources * sizeof *m.names);
    bool ok = (m.x && m.y && m.lines && m.names) || error_set(e, "%s: no memory to draw", path);
    ok = ok && svg_open(&s, path, 640, report->weights ? 760 : 380, "Layers by depth", e);
    if (ok) {
        depthi_draw_sums(report, &m, &s);
        if (report->weights) depthi_draw_weights(report, &m, &s);
        ok = svg_close(&s, e);
    }
    free(m.x), free(m.y), free(m.lines), free(m.names);
    return ok;
}

#endif
