#!/bin/sh
# The headers as guests in other people's files: either order, twice, after hostile macros, in every
# standard of C and C++ that they claim, under all of clang's warnings but a few, as Microsoft's
# compiler would see them, and in files of different options that are linked together. Run it from
# the repository root. Ends like a test program.
work=${BUILD:-build}/hygiene
passed=0 failed=0 skipped=0
strict='-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wdouble-promotion -Wcast-qual -Wvla -Werror'
# What of -Weverything is not followed, and why.
chosen="-Wno-padded"                          # a struct has the size it has
chosen="$chosen -Wno-declaration-after-statement" # C11
chosen="$chosen -Wno-comma"                   # a = 1, b = 2: pairs that belong together
chosen="$chosen -Wno-conditional-uninitialized" # is read only after the call that sets it succeeded
chosen="$chosen -Wno-old-style-cast -Wno-zero-as-null-pointer-constant" # C, in C++
chosen="$chosen -Wno-unsafe-buffer-usage -Wno-switch-default -Wno-unknown-warning-option" # later ones
mkdir -p "$work" || exit 2

# quiet NAME COMMAND...: succeeds and prints nothing.
quiet() {
    case=$1
    shift
    if "$@" >"$work/log" 2>&1 && [ ! -s "$work/log" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        head -n 12 "$work/log"
        echo "FAIL $case"
    fi
}
there() {
    command -v "$1" >/dev/null 2>&1 && return 0
    echo "SKIP $1 is not there"
    skipped=$((skipped + 1))
    return 1
}

# Declarations twice, implementation, and both again. What <windows.h>, its <rpcndr.h> and
# <complex.h> define in other people's files.
for first in kda attnres; do
    [ $first = kda ] && second=attnres || second=kda
    cat >"$work/$first-first.c" <<EOF
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define small char
#define hyper double
#define interface struct
#define near
#define far
#define IN
#define OUT
#define CONST const
#define ERROR 0
#define I (0.0f + 1.0iF)
#include "$first.h"
#include "$second.h"
#include "$first.h"
#define KDA_IMPLEMENTATION
#define ATTNRES_IMPLEMENTATION
#include "$second.h"
#include "$first.h"
#include "$second.h"
EOF
    cp "$work/$first-first.c" "$work/$first-first.cpp"
done
plain='-DKDA_NO_SIMD -DATTNRES_NO_SIMD'
for cc in gcc clang; do
    there $cc || continue
    for std in c11 c17 c2x gnu11; do
        for first in kda attnres; do
            # the kernels too, but once: they are the same text in every standard
            [ $std = c11 ] && options='-O2' || options=$plain
            quiet "$cc -std=$std, $first.h first" $cc -std=$std $options $strict -Wstrict-prototypes \
                -I. -fsyntax-only "$work/$first-first.c"
        done
    done
done
for cxx in g++ clang++; do
    there $cxx || continue
    for std in c++11 c++14 c++17 c++20; do
        [ $std = c++11 ] && options='-O2' || options=$plain
        quiet "$cxx -std=$std" $cxx -std=$std $options $strict -I. -fsyntax-only "$work/kda-first.cpp"
    done
done

if there clang; then
    for name in kda attnres; do
        upper=$(echo $name | tr '[:lower:]' '[:upper:]')
        printf '#define %s_IMPLEMENTATION\n#include "%s.h"\n' "$upper" $name >"$work/$name.c"
        cp "$work/$name.c" "$work/$name.cpp"
        quiet "$name.h, -Weverything" clang -std=c11 -O2 -Weverything $chosen -Werror -I. \
            -fsyntax-only "$work/$name.c"
        quiet "$name.h, -Weverything, C++" clang++ -std=c++17 -O2 -Weverything $chosen \
            -Wno-c++98-compat-pedantic -Werror -I. -fsyntax-only "$work/$name.cpp"
        # clang-cl, and cl, which knows no attributes and takes every instruction set as there.
        # Microsoft's own headers are not to be had: what of them is used stands here.
        mkdir -p "$work/msvc"
        cat >"$work/msvc/math.h" <<'EOF'
#ifdef __cplusplus
extern "C" {
#endif
float fmaf(float, float, float);
float sqrtf(float);
float fabsf(float);
double fabs(double);
double sqrt(double);
#ifdef __cplusplus
}
#endif
#define INFINITY ((float)(1e300 * 1e300))
EOF
        cat >"$work/msvc/string.h" <<'EOF'
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
void *memcpy(void *, const void *, size_t);
void *memmove(void *, const void *, size_t);
void *memset(void *, int, size_t);
int memcmp(const void *, const void *, size_t);
#ifdef __cplusplus
}
#endif
EOF
        cat >"$work/msvc/malloc.h" <<'EOF'
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
void *malloc(size_t);
void free(void *);
void *_aligned_malloc(size_t, size_t);
void _aligned_free(void *);
#ifdef __cplusplus
}
#endif
EOF
        cp "$work/msvc/malloc.h" "$work/msvc/stdlib.h"
        echo 'typedef int jmp_buf[16];' >"$work/msvc/setjmp.h"
        for target in x86_64 i686; do
            microsoft="--target=$target-pc-windows-msvc -nostdlibinc -isystem $work/msvc -I."
            # 32 bits: what float.h tells is SSE2's arithmetic, which is what cl takes there.
            quiet "$name.h, clang-cl, $target" clang $microsoft -std=c11 -msse2 -O2 -Wall -Wextra \
                -Werror -fsyntax-only "$work/$name.c"
            quiet "$name.h, as cl sees it, $target" clang $microsoft -std=c11 -U__clang__ -mavx512f \
                -mfma -mf16c -O2 -Wall -Wextra -Werror -Wno-ignored-attributes -fsyntax-only "$work/$name.c"
        done
        quiet "$name.h, as cl sees it, C++" clang++ --target=x86_64-pc-windows-msvc -nostdlibinc \
            -isystem "$work/msvc" -I. -std=c++17 -U__clang__ -mavx512f -mfma -mf16c -O2 -Wall \
            -Wextra -Werror -fsyntax-only "$work/$name.cpp"
    done
fi

# Files of different languages, options and optimisation in one program: the implementation in C
# without kernels, the use of it in C++; and extern and static copies side by side.
if there gcc && there g++; then
    sed '/IMPLEMENTATION/d' tests/header.cpp >"$work/header.cpp"
    sed -i 's|"\.\./|"|' "$work/header.cpp"
    quiet 'C at -O0' gcc -std=c11 -O0 -I. -c "$work/kda-first.c" -o "$work/c.o"
    quiet 'C++ that uses it' g++ -std=c++11 -O2 -I. "$work/header.cpp" "$work/c.o" -o "$work/mixed" -lm
    quiet 'which runs' sh -c "'$work/mixed' >/dev/null"
    quiet 'a file at -O0' gcc -std=gnu11 -O0 -c tests/header_second.c -o "$work/second.o"
    quiet 'a static copy at -Os' gcc -std=c17 -Os $plain -c tests/header_static.c -o "$work/static.o"
    quiet 'and an extern one' gcc -std=c11 -D_POSIX_C_SOURCE=200809L -O1 $plain tests/test_header.c \
        "$work/second.o" "$work/static.o" -o "$work/linked" -lm
    quiet 'all of which run' sh -c "'$work/linked' >/dev/null"
fi

# Arithmetic that would break the promises is refused.
if there gcc; then
    for name in kda attnres; do
        for options in -ffast-math -ffinite-math-only '-mfpmath=387'; do
            if gcc -std=c11 $options -ffreestanding $plain -I. -E -x c "$work/$name.c" >/dev/null 2>"$work/log"; then
                failed=$((failed + 1))
                echo "FAIL $name.h is not refused under $options"
            elif grep -q "error: #error \"$name.h:" "$work/log"; then
                passed=$((passed + 1))
            else
                skipped=$((skipped + 1))
                echo "SKIP $name.h under $options: $(head -n 1 "$work/log")"
            fi
        done
    done
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
