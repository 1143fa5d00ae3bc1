/* svg.h - charts of lines as SVG files, readable on light and on dark pages.
 *
 *     svg picture;
 *     if (!svg_open(&picture, "out.svg", 640, 400, "Time against context", e)) ...
 *     svg_line line = {"full attention", contexts, times, n, SVG_SOLID};
 *     svg_axis x = {"context, tokens", SVG_LOG2, 0, 0}, y = {"ms", SVG_LOG10, 0, 0};
 *     svg_chart chart = {"Time", x, y, &line, 1};
 *     svg_draw(&picture, &chart, 0, 40, 640, 360);
 *     if (!svg_close(&picture, e)) ...
 *
 * Colours are classes whose values a style sheet in the file gives for both colour schemes of the
 * reader's page. Any numbers and any text may be given: a point that is not finite, lies outside of
 * a given range, or is not positive on a logarithmic axis is left out and breaks its line; in text,
 * control characters and what XML does not allow become '?'.
 *
 * Every function is static.
 */
#ifndef SVG_H
#define SVG_H

#include "error.h"
#include "output.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum svg_scale {
    SVG_LINEAR = 0,
    SVG_LOG10 = 1,
    SVG_LOG2 = 2 /* ticks at powers of 2, as 512, 4K, 1M */
} svg_scale;

typedef enum svg_dash { SVG_SOLID = 0, SVG_DASHED = 1 } svg_dash; /* dashed lines have no points */

typedef struct svg_axis {
    const char *label;
    svg_scale scale;
    double low, high; /* the range; unless low < high, that of the data */
} svg_axis;

/* Colours go by the place of a line in its chart, and repeat after SVG_COLOURS of them. */
#define SVG_COLOURS 6

typedef struct svg_line {
    const char *name; /* for the legend; null: not in it */
    const double *x, *y;
    size_t n;
    svg_dash dash;
} svg_line;

typedef struct svg_chart {
    const char *title;
    svg_axis x, y;
    const svg_line *lines; /* [n_lines] */
    size_t n_lines;
} svg_chart;

typedef struct svg {
    output out; /* the picture appears under its name when it is complete */
    FILE *file; /* of out */
} svg;

/* Begins a picture of width x height units, with a title for those who cannot see it. The path must
 * live as long as the picture. */
static inline bool svg_open(svg *s, const char *path, double width, double height,
                            const char *title, error *e);

/* Draws a chart, its labels included, into a box of the picture: at least 160 x 120 units. */
static inline void svg_draw(svg *s, const svg_chart *chart, double left, double top, double width,
                            double height);

/* One line of text; size in units. */
static inline void svg_text(svg *s, double x, double y, double size, const char *text);

/* Ends the picture. An error of any write since svg_open is reported here. */
static inline bool svg_close(svg *s, error *e);

/* ---- Text ---- */

/* Bytes of the UTF-8 character at `text` if it may stand in the file, else 0. */
static size_t svgi_character(const char *text) {
    const unsigned char *c = (const unsigned char *)text;
    if (c[0] < 0x80) return c[0] >= 0x20 && c[0] != 0x7F;
    size_t n = c[0] >= 0xF0 ? 4 : c[0] >= 0xE0 ? 3 : 2;
    if (c[0] < 0xC2 || c[0] > 0xF4) return 0;
    unsigned long code = c[0] & (0xFFu >> (n + 1));
    for (size_t i = 1; i < n; i++) {
        if ((c[i] & 0xC0) != 0x80) return 0; /* also where the string ends */
        code = code << 6 | (c[i] & 0x3Fu);
    }
    if (n == 3 && (code < 0x800 || (code >= 0xD800 && code < 0xE000) || code >= 0xFFFE)) return 0;
    if (n == 4 && (code < 0x10000 || code > 0x10FFFF)) return 0;
    return n;
}

static void svgi_escape(svg *s, const char *text) {
    static const struct {
        char character;
        const char *entity;
    } entities[] = {{'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'"', "&quot;"}};
    while (text && *text) {
        size_t n = svgi_character(text), i = 0;
        while (i < 4 && entities[i].character != *text) i++;
        if (i < 4)
            fputs(entities[i].entity, s->file);
        else if (n == 0)
            fputc('?', s->file);
        else
            fwrite(text, 1, n, s->file);
        text += n ? n : 1;
    }
}

/* anchor: start, middle or end; turned: a quarter to the left. */
static void svgi_label(svg *s, double x, double y, double size, const char *anchor, bool turned,
                       const char *text) {
    fprintf(s->file, "<text x=\"%.1f\" y=\"%.1f\" font-size=\"%.1f\" text-anchor=\"%s\"", x, y,
            size, anchor);
    if (turned) fprintf(s->file, " transform=\"rotate(-90 %.1f %.1f)\"", x, y);
    fputs(">", s->file);
    svgi_escape(s, text);
    fputs("</text>\n", s->file);
}

static inline void svg_text(svg *s, double x, double y, double size, const char *text) {
    svgi_label(s, x, y, size, "start", false, text);
}

/* ---- Axes ---- */

/* An axis that is ready to draw: its range in scaled numbers, and its ticks. */
typedef struct svgi_range {
    svg_scale scale;
    double low, high; /* after svgi_scaled; low < high */
    double first, step;
    size_t n_ticks;
} svgi_range;

/* What is linear on the axis; NaN for what cannot be shown. */
static double svgi_scaled(svg_scale scale, double value) {
    if (scale == SVG_LINEAR) return isfinite(value) ? value : (double)NAN;
    if (!(value > 0) || !isfinite(value)) return (double)NAN;
    return scale == SVG_LOG2 ? log2(value) : log10(value);
}

/* 1, 2 or 5 times a power of 10, at least `step`; on a logarithmic axis a whole number. */
static double svgi_nice_step(double step, bool whole) {
    double power = pow(10, floor(log10(step)));
    double ratio = step / power * (1 - 1e-9);
    double nice = (ratio <= 1 ? 1 : ratio <= 2 ? 2 : ratio <= 5 ? 5 : 10) * power;
    return whole && nice < 1 ? 1 : nice;
}

static void svgi_place_ticks(svgi_range *range, size_t at_most) {
    double width = range->high - range->low;
    range->step = svgi_nice_step(width / (double)at_most, range->scale != SVG_LINEAR);
    range->first = ceil(range->low / range->step - 1e-9) * range->step;
    double n = floor((range->high - range->first) / range->step + 1e-9) + 1;
    range->n_ticks = n > 0 ? (size_t)n : 0;
}

/* The range that an axis asks for, or that holds the data, widened to whole steps. */
static svgi_range svgi_range_of(const svg_chart *chart, bool vertical, size_t at_most) {
    const svg_axis *axis = vertical ? &chart->y : &chart->x;
    svgi_range range = {axis->scale, HUGE_VAL, -HUGE_VAL, 0, 1, 0};
    double low = svgi_scaled(axis->scale, axis->low), high = svgi_scaled(axis->scale, axis->high);
    bool given = low < high;
    if (given) range.low = low, range.high = high;
    for (size_t i = 0; !given && i < chart->n_lines; i++)
        for (size_t j = 0; j < chart->lines[i].n; j++) {
            const svg_line *line = &chart->lines[i];
            double value = svgi_scaled(axis->scale, vertical ? line->y[j] : line->x[j]);
            double other = svgi_scaled(vertical ? chart->x.scale : chart->y.scale,
                                       vertical ? line->x[j] : line->y[j]);
            if (isnan(value) || isnan(other)) continue;
            range.low = fmin(range.low, value), range.high = fmax(range.high, value);
        }
    if (!(range.low <= range.high)) range.low = 0, range.high = 1;
    /* What is closer than numbers can tell apart, or so wide that a difference overflows. */
    range.low = fmax(range.low, -1e300), range.high = fmin(range.high, 1e300);
    double largest = fmax(fabs(range.low), fabs(range.high));
    double least = fmax(largest * 1e-9, axis->scale == SVG_LINEAR ? 1e-290 : 1e-6);
    if (range.high - range.low < least) {
        double half = axis->scale != SVG_LINEAR ? 1 : fmax(fabs(range.high) * 0.1, 1e-280);
        range.low -= half, range.high += half;
    }
    svgi_place_ticks(&range, at_most);
    if (!given && vertical) {
        range.low = floor(range.low / range.step + 1e-9) * range.step;
        range.high = ceil(range.high / range.step - 1e-9) * range.step;
        svgi_place_ticks(&range, at_most);
    }
    return range;
}

static double svgi_tick(const svgi_range *range, size_t i) {
    double tick = range->first + (double)i * range->step;
    return fabs(tick) < range->step * 1e-6 ? 0 : tick;
}

static void svgi_tick_text(const svgi_range *range, double tick, char *text, size_t n) {
    static const char suffix[] = "\0KMGTPE";
    int power = (int)lround(fmax(-1100, fmin(1100, tick)));
    if (range->scale == SVG_LINEAR) {
        snprintf(text, n, "%.6g", tick);
        return;
    }
    if (range->scale == SVG_LOG10 && abs(power) > 5) { /* pow could overflow */
        snprintf(text, n, "1e%d", power);
        return;
    }
    if (range->scale == SVG_LOG10) {
        snprintf(text, n, "%g", pow(10, power));
        return;
    }
    int kilo = power < 10 ? 0 : power / 10 > 6 ? 6 : power / 10;
    snprintf(text, n, "%.6g%.1s", ldexp(1, power - 10 * kilo), suffix + kilo);
}

/* ---- Charts ---- */

/* The frame that lines are drawn in, and what its sides stand for. */
typedef struct svgi_frame {
    double left, top, width, height;
    svgi_range x, y;
} svgi_frame;

static double svgi_at_x(const svgi_frame *f, double scaled) {
    return f->left + f->width * ((scaled - f->x.low) / (f->x.high - f->x.low));
}

static double svgi_at_y(const svgi_frame *f, double scaled) {
    return f->top + f->height * (1 - (scaled - f->y.low) / (f->y.high - f->y.low));
}

static void svgi_draw_axes(svg *s, const svg_chart *chart, const svgi_frame *f) {
    char text[40];
    double bottom = f->top + f->height, right = f->left + f->width;
    for (size_t i = 0; i < f->x.n_ticks; i++) {
        double tick = svgi_tick(&f->x, i), x = svgi_at_x(f, tick);
        svgi_tick_text(&f->x, tick, text, sizeof text);
        fprintf(s->file, "<path class=\"grid\" d=\"M%.1f %.1fV%.1f\"/>\n", x, f->top, bottom);
        svgi_label(s, x, bottom + 16, 11, "middle", false, text);
    }
    for (size_t i = 0; i < f->y.n_ticks; i++) {
        double tick = svgi_tick(&f->y, i), y = svgi_at_y(f, tick);
        svgi_tick_text(&f->y, tick, text, sizeof text);
        fprintf(s->file, "<path class=\"grid\" d=\"M%.1f %.1fH%.1f\"/>\n", f->left, y, right);
        svgi_label(s, f->left - 6, y + 4, 11, "end", false, text);
    }
    fprintf(s->file, "<path class=\"frame\" d=\"M%.1f %.1fV%.1fH%.1f\"/>\n", f->left, f->top,
            bottom, right);
    svgi_label(s, f->left + f->width / 2, bottom + 34, 12, "middle", false, chart->x.label);
    svgi_label(s, f->left - 48, f->top + f->height / 2, 12, "middle", true, chart->y.label);
}

/* Whether point i is to be seen, and where. */
static bool svgi_point(const svgi_frame *f, const svg_line *line, size_t i, double *x, double *y) {
    double slack = 1e-9; /* of a range: its ends belong to it */
    double px = svgi_scaled(f->x.scale, line->x[i]), py = svgi_scaled(f->y.scale, line->y[i]);
    double u = (px - f->x.low) / (f->x.high - f->x.low);
    double v = (py - f->y.low) / (f->y.high - f->y.low);
    if (!(u >= -slack && u <= 1 + slack && v >= -slack && v <= 1 + slack)) return false;
    *x = svgi_at_x(f, px), *y = svgi_at_y(f, py);
    return true;
}

static void svgi_draw_line(svg *s, const svgi_frame *f, const svg_line *line, size_t colour) {
    double x, y;
    bool drawing = false;
    fprintf(s->file, "<path class=\"line c%zu%s\" d=\"", colour,
            line->dash == SVG_DASHED ? " dashed" : "");
    for (size_t i = 0; i < line->n; i++) {
        bool seen = svgi_point(f, line, i, &x, &y);
        if (seen) fprintf(s->file, "%c%.1f %.1f", drawing ? 'L' : 'M', x, y);
        drawing = seen;
    }
    fputs("\"/>\n", s->file);
    if (line->dash == SVG_DASHED) return;
    for (size_t i = 0; i < line->n; i++)
        if (svgi_point(f, line, i, &x, &y))
            fprintf(s->file, "<circle class=\"c%zu\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\"/>\n", colour,
                    x, y);
}

static void svgi_draw_legend(svg *s, const svg_chart *chart, double left, double top) {
    double y = top;
    for (size_t i = 0; i < chart->n_lines; i++) {
        const svg_line *line = &chart->lines[i];
        if (!line->name) continue;
        fprintf(s->file, "<path class=\"line c%zu%s\" d=\"M%.1f %.1fh22\"/>\n", i % SVG_COLOURS,
                line->dash == SVG_DASHED ? " dashed" : "", left, y - 4);
        svgi_label(s, left + 28, y, 11, "start", false, line->name);
        y += 15;
    }
}

static inline void svg_draw(svg *s, const svg_chart *chart, double left, double top, double width,
                            double height) {
    svgi_frame f;
    size_t named = 0;
    for (size_t i = 0; i < chart->n_lines; i++) named += chart->lines[i].name != NULL;
    double legend = 15 * (double)named + 6;
    f.left = left + 66, f.width = fmax(width - 66 - 20, 40);
    f.top = top + 26 + legend, f.height = fmax(height - 26 - legend - 44, 40);
    f.x = svgi_range_of(chart, false, (size_t)(f.width / 45) + 1);
    f.y = svgi_range_of(chart, true, (size_t)(f.height / 40) + 1);
    svgi_label(s, f.left, top + 16, 14, "start", false, chart->title);
    svgi_draw_legend(s, chart, f.left, top + 36);
    svgi_draw_axes(s, chart, &f);
    for (size_t i = 0; i < chart->n_lines; i++)
        svgi_draw_line(s, &f, &chart->lines[i], i % SVG_COLOURS);
}

/* ---- The file ---- */

/* Of the page, of text and axes, of the grid, and of the lines. */
typedef struct svgi_colours {
    const char *paper, *ink, *grid, *line[SVG_COLOURS];
} svgi_colours;

static const svgi_colours svgi_light = {
    "#ffffff",
    "#1f2328",
    "#d8dee4",
    {"#0969da", "#c2410c", "#1a7f37", "#8250df", "#9a6700", "#57606a"}};
static const svgi_colours svgi_dark = {
    "#0d1117",
    "#e6edf3",
    "#30363d",
    {"#58a6ff", "#ff9e64", "#56d364", "#d2a8ff", "#e3b341", "#9ea7b3"}};

static void svgi_put_colours(svg *s, const svgi_colours *colours) {
    fprintf(s->file, ".paper{fill:%s}text{fill:%s}.frame{stroke:%s}.grid{stroke:%s}\n",
            colours->paper, colours->ink, colours->ink, colours->grid);
    for (int i = 0; i < SVG_COLOURS; i++)
        fprintf(s->file, "path.c%d{stroke:%s}circle.c%d{fill:%s}\n", i, colours->line[i], i,
                colours->line[i]);
}

static inline bool svg_open(svg *s, const char *path, double width, double height,
                            const char *title, error *e) {
    if (!output_open(&s->out, path, e)) return false;
    s->file = s->out.file;
    fprintf(s->file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" width=\"%.0f\" height=\"%.0f\""
            " viewBox=\"0 0 %.0f %.0f\">\n<title>",
            width, height, width, height);
    svgi_escape(s, title);
    fputs("</title>\n<style>\ntext{font-family:sans-serif}path{fill:none}.line{stroke-width:2}"
          ".dashed{stroke-dasharray:6 4}\n",
          s->file);
    svgi_put_colours(s, &svgi_light);
    fputs("@media (prefers-color-scheme:dark){\n", s->file);
    svgi_put_colours(s, &svgi_dark);
    fprintf(s->file, "}\n</style>\n<rect class=\"paper\" width=\"%.0f\" height=\"%.0f\"/>\n", width,
            height);
    return true;
}

static inline bool svg_close(svg *s, error *e) {
    fputs("</svg>\n", s->file);
    fflush(s->file);
    bool written = !ferror(s->file); /* also of what was flushed before */
    if (!written) error_set(e, "%s: cannot write: %s", s->out.part, strerror(errno));
    s->file = NULL;
    return output_close(&s->out, written, e);
}

#endif
