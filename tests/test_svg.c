/* test_svg.c - pictures are well-formed whatever numbers and text they are given. */
#define OUTPUT_IMPLEMENTATION
#include "../examples/output.h"
#include "../examples/svg.h"

#include "test.h"

static const double contexts[] = {4096, 16384, 65536, 131072, 262144, 524288, 1048576};
static const double times[] = {3.28, 3.5, 3.8, 3.81, 3.85, 3.87, 3.82};

static char *read_file(const char *path) {
    FILE *f = fopen(path, "rb");
    CHECK(f != NULL);
    if (!f) return (char *)test_alloc(1);
    fseek(f, 0, SEEK_END);
    size_t n = (size_t)ftell(f);
    rewind(f);
    char *text = (char *)test_alloc(n + 1);
    CHECK(fread(text, 1, n, f) == n);
    fclose(f);
    return text;
}

#define NEW_FILE "/tmp/test_svg_XXXXXX"

static void make_file(char *path) {
    int descriptor = mkstemp(path);
    CHECK(descriptor >= 0 && close(descriptor) == 0);
}

/* Draws one chart to a file of its own and reads it back. */
static char *drawn(const svg_chart *chart, const char *title) {
    char path[] = NEW_FILE;
    svg s;
    error e;
    make_file(path);
    CHECK(svg_open(&s, path, 640, 400, title, &e));
    svg_draw(&s, chart, 0, 40, 640, 360);
    CHECK(svg_close(&s, &e));
    char *text = read_file(path);
    unlink(path);
    return text;
}

static size_t count(const char *text, const char *what) {
    size_t n = 0;
    for (const char *at = text; (at = strstr(at, what)) != NULL; at += strlen(what)) n++;
    return n;
}

static int is_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-';
}

/* Behind the attributes of a tag that begins at `at`; null if they are not well-formed. */
static const char *skip_attributes(const char *at) {
    while (*at == ' ') {
        at++;
        if (!is_name(*at)) return NULL;
        while (is_name(*at)) at++;
        if (at[0] != '=' || at[1] != '"') return NULL;
        for (at += 2; *at && *at != '"' && *at != '<'; at++) continue;
        if (*at++ != '"') return NULL;
    }
    return at;
}

static int is_entity(const char *at) {
    return !strncmp(at, "&amp;", 5) || !strncmp(at, "&lt;", 4) || !strncmp(at, "&gt;", 4) ||
           !strncmp(at, "&quot;", 6);
}

/* Tags balanced by name, attributes quoted, entities known, one root. */
static int is_well_formed(const char *text) {
    const char *open[16];
    size_t depth = 0, roots = 0;
    for (const char *at = text; *at; at++) {
        if (*at == '&' && !is_entity(at)) return 0;
        if (*at == '>' || (depth == 0 && *at != '<' && *at != '\n')) return 0;
        if (*at != '<') continue;
        int closing = at[1] == '/';
        const char *name = at + 1 + closing, *end = name;
        while (is_name(*end)) end++;
        if (end == name) return 0;
        if (closing) {
            size_t n = (size_t)(end - name);
            if (depth == 0 || strncmp(open[--depth], name, n) != 0 || is_name(open[depth][n]))
                return 0;
            if (*end != '>') return 0;
        } else {
            if (depth == 0) roots++;
            if (depth == 16) return 0;
            end = skip_attributes(end);
            if (!end) return 0;
            if (*end == '/')
                end++;
            else
                open[depth++] = name;
            if (*end != '>') return 0;
        }
        at = end;
    }
    return depth == 0 && roots == 1;
}

/* Well-formed, and every number is a finite one. */
static void check_picture(const char *text) {
    CHECK(is_well_formed(text));
    const char *odd = strstr(text, "nan") ? strstr(text, "nan") : strstr(text, "inf");
    CHECK_MSG(!odd, "not a finite number: %.80s", odd - (odd - text < 40 ? odd - text : 40));
}

static svg_chart chart_of(const svg_line *lines, size_t n) {
    svg_chart chart = {
        "Ratio", {"context, tokens", SVG_LOG2, 0, 0}, {"ratio", SVG_LINEAR, 0, 0}, lines, n};
    return chart;
}

static void the_checker_finds_faults(void) {
    CHECK(is_well_formed("<a>\n<b x=\"1\"/>t&amp;</a>\n"));
    CHECK(!is_well_formed("<a><b></a></b>"));
    CHECK(!is_well_formed("<a>"));
    CHECK(!is_well_formed("<a></a><a></a>"));
    CHECK(!is_well_formed("<a>x & y</a>"));
    CHECK(!is_well_formed("<a x=1></a>"));
    CHECK(!is_well_formed("<a x=\"<\"></a>"));
    CHECK(!is_well_formed("<a></ab>"));
}

static void an_ordinary_chart(void) {
    svg_line lines[2] = {{"measured", contexts, times, 7, SVG_SOLID},
                         {"limit", contexts, times, 2, SVG_DASHED}};
    svg_chart chart = chart_of(lines, 2);
    char *text = drawn(&chart, "A title");
    check_picture(text);
    CHECK(count(text, "<circle") == 7); /* none on the dashed line */
    CHECK(count(text, "class=\"line c0\"") == 2 && count(text, "class=\"line c1 dashed\"") == 2);
    CHECK(strstr(text, ">4K<") && strstr(text, ">1M<"));
    CHECK(strstr(text, ">context, tokens<") && strstr(text, ">ratio<") && strstr(text, ">Ratio<"));
    CHECK(strstr(text, "<title>A title</title>"));
    CHECK(count(text, "prefers-color-scheme:dark") == 1);
    free(text);
}

/* x and y of the n-th circle. */
static void circle(const char *text, size_t n, double *x, double *y) {
    const char *at = text;
    *x = *y = (double)NAN;
    for (size_t i = 0; at && i <= n; i++) at = strstr(at + 1, "<circle");
    CHECK(at != NULL);
    if (at) CHECK(sscanf(strstr(at, "cx="), "cx=\"%lf\" cy=\"%lf\"", x, y) == 2);
}

/* Equal steps of what is scaled are equal steps on paper, larger values lie higher. */
static void places(void) {
    static const double x[] = {1, 10, 100}, y[] = {0, 5, 10};
    double at_x[3], at_y[3];
    svg_line line = {"", x, y, 3, SVG_SOLID};
    svg_chart chart = chart_of(&line, 1);
    chart.x.scale = SVG_LOG10;
    char *text = drawn(&chart, "");
    for (size_t i = 0; i < 3; i++) circle(text, i, &at_x[i], &at_y[i]);
    CHECK_AT_MOST("x", fabs(at_x[0] + at_x[2] - 2 * at_x[1]), 0.21);
    CHECK_AT_MOST("y", fabs(at_y[0] + at_y[2] - 2 * at_y[1]), 0.21);
    CHECK(at_x[0] < at_x[1] && at_x[1] < at_x[2]);
    CHECK(at_y[0] > at_y[1] && at_y[1] > at_y[2]);
    CHECK(strstr(text, ">10<") && strstr(text, ">100<") && strstr(text, ">8<"));
    free(text);
}

static void text_is_escaped(void) {
    svg_line line = {"a<b> & \"c\" \x01\xC3\xA9\xC3(\xED\xA0\x80\xEF\xBF\xBF\xF5", contexts, times,
                     7, SVG_SOLID};
    svg_chart chart = chart_of(&line, 1);
    chart.title = "]]></svg><script>";
    chart.x.label = "\xE2\x82"; /* ends within a character */
    chart.y.label = NULL;
    char *text = drawn(&chart, "\n</title>");
    check_picture(text);
    CHECK(strstr(text, "a&lt;b&gt; &amp; &quot;c&quot; ?\xC3\xA9?(???") != NULL);
    CHECK(!strstr(text, "<script"));
    free(text);
}

/* The first and last of each length that XML allows, and those beside them. */
static void characters_of_every_length(void) {
    static const char *const allowed[] = {" ",
                                          "~",
                                          "\xC2\x80",
                                          "\xDF\xBF",
                                          "\xE0\xA0\x80",
                                          "\xED\x9F\xBF",
                                          "\xEE\x80\x80",
                                          "\xEF\xBF\xBD",
                                          "\xF0\x90\x80\x80",
                                          "\xF4\x8F\xBF\xBF"};
    static const char *const refused[] = {
        "\x1F",         "\x7F",         "\xC1\xBF",         "\xE0\x9F\xBF",    "\xED\xA0\x80",
        "\xED\xBF\xBF", "\xEF\xBF\xBE", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80"};
    svg_chart chart = chart_of(NULL, 0);
    char title[20], want[40];
    for (size_t i = 0; i < sizeof allowed / sizeof *allowed; i++) {
        snprintf(title, sizeof title, "[%s]", allowed[i]);
        snprintf(want, sizeof want, "<title>%s</title>", title);
        char *text = drawn(&chart, title);
        CHECK_MSG(strstr(text, want), "character %zu", i);
        free(text);
    }
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        snprintf(title, sizeof title, "[%s]", refused[i]);
        snprintf(want, sizeof want, "<title>[%.*s]</title>", (int)strlen(refused[i]), "????");
        char *text = drawn(&chart, title);
        CHECK_MSG(strstr(text, want), "refused character %zu", i);
        free(text);
    }
}

static void a_line_of_text(void) {
    char path[] = NEW_FILE;
    svg s;
    error e;
    make_file(path);
    CHECK(svg_open(&s, path, 100, 50, "", &e));
    svg_text(&s, 12.5, 30, 13, "two < three");
    CHECK(svg_close(&s, &e));
    char *text = read_file(path);
    unlink(path);
    check_picture(text);
    CHECK(strstr(text, "<text x=\"12.5\" y=\"30.0\" font-size=\"13.0\" text-anchor=\"start\">"
                       "two &lt; three</text>"));
    free(text);
}

static void points_that_cannot_be_shown(void) {
    static const double x[] = {1, 2, (double)NAN, 8, 16, -4, 0, 32, HUGE_VAL};
    static const double y[] = {1, (double)NAN, 3, 4, HUGE_VAL, 5, 6, 7, 8};
    svg_line line = {"holes", x, y, 9, SVG_SOLID};
    svg_chart chart = chart_of(&line, 1);
    char *text = drawn(&chart, "");
    check_picture(text);
    CHECK(count(text, "<circle") == 3); /* (1, 1), (8, 4), (32, 7) */
    const char *path = strstr(text, "<path class=\"line c0\" d=\"M");
    path = path ? strstr(path + 1, "<path class=\"line c0\" d=\"M") : NULL; /* after the legend's */
    CHECK(path != NULL);
    if (path) CHECK(memchr(path + 26, 'L', (size_t)(strchr(path + 26, '"') - path - 26)) == NULL);
    free(text);
}

static void a_given_range_leaves_out(void) {
    svg_line line = {"", contexts, times, 7, SVG_SOLID};
    svg_chart chart = chart_of(&line, 1);
    chart.y.low = 3.6, chart.y.high = 3.86;
    char *text = drawn(&chart, "");
    check_picture(text);
    CHECK(count(text, "<circle") == 4);
    free(text);
}

static void extreme_values(void) {
    static const double pairs[][2] = {{0, 0},           {5, 5},           {-1e308, 1e308},
                                      {1e-308, 2e-308}, {1e-320, 1e-320}, {1, 1 + 1e-15},
                                      {-3, -2},         {1e15, 1e15 + 1}, {1e-9, 1e9}};
    static const svg_scale scales[] = {SVG_LINEAR, SVG_LOG10, SVG_LOG2};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (size_t sx = 0; sx < 3; sx++)
            for (size_t sy = 0; sy < 3; sy++) {
                svg_line line = {"", pairs[i], pairs[i], 2, SVG_SOLID};
                svg_chart chart = chart_of(&line, 1);
                chart.x.scale = scales[sx], chart.y.scale = scales[sy];
                char *text = drawn(&chart, "");
                check_picture(text);
                CHECK_MSG(strlen(text) < 20000, "pair %zu: %zu bytes", i, strlen(text));
                free(text);
            }
}

static void few_or_no_points(void) {
    for (size_t n = 0; n < 3; n++) {
        svg_line line = {"few", contexts, times, n, SVG_SOLID};
        svg_chart chart = chart_of(&line, 1);
        char *text = drawn(&chart, "");
        check_picture(text);
        CHECK(count(text, "<circle") == n);
        free(text);
    }
    svg_chart empty = chart_of(NULL, 0);
    char *text = drawn(&empty, "");
    check_picture(text);
    free(text);
}

static void a_small_box(void) {
    svg_line lines[SVG_COLOURS + 1];
    for (size_t i = 0; i < SVG_COLOURS + 1; i++) {
        svg_line line = {"line", contexts, times, 7, SVG_SOLID};
        lines[i] = line;
    }
    svg_chart chart = chart_of(lines, SVG_COLOURS + 1);
    char path[] = NEW_FILE;
    svg s;
    error e;
    make_file(path);
    CHECK(svg_open(&s, path, 10, 10, "small", &e));
    svg_draw(&s, &chart, 0, 0, 10, 10);
    CHECK(svg_close(&s, &e));
    char *text = read_file(path);
    unlink(path);
    check_picture(text);
    CHECK(count(text, "class=\"line c0\"") == 4); /* the seventh line has the first colour again */
    free(text);
}

static void files_that_cannot_be_written(void) {
    svg s;
    error e;
    CHECK(!svg_open(&s, "/tmp/no such directory/x.svg", 10, 10, "", &e));
    CHECK(strstr(e.text, "/tmp/no such directory/x.svg.part: cannot write") == e.text);
    if (!test_has_full_device()) return;
    char directory[] = "/tmp/test_svg_XXXXXX", path[40];
    CHECK(mkdtemp(directory) != NULL);
    snprintf(path, sizeof path, "%s/full", directory);
    CHECK(symlink("/dev/full", path) == 0); /* so that a fault removes no device */
    CHECK(svg_open(&s, path, 10, 10, "", &e));
    CHECK(!svg_close(&s, &e));
    CHECK(strstr(e.text, path) == e.text);
    CHECK(unlink(path) == 0 && rmdir(directory) == 0);
}

int main(void) {
    TEST(the_checker_finds_faults);
    TEST(an_ordinary_chart);
    TEST(places);
    TEST(text_is_escaped);
    TEST(characters_of_every_length);
    TEST(a_line_of_text);
    TEST(points_that_cannot_be_shown);
    TEST(a_given_range_leaves_out);
    TEST(extreme_values);
    TEST(few_or_no_points);
    TEST(a_small_box);
    TEST(files_that_cannot_be_written);
    return test_summary();
}
