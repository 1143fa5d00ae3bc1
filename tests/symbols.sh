#!/bin/sh
# What the headers' objects need from outside and what they give away, compiled alone by $CC (cc):
# nothing undefined but a few functions of libc, libm and the compiler's own, so that malloc,
# printf, exit, abort and assert cannot be reached; nothing exported without the prefix; nothing
# exported at all with *_STATIC; no writable data. Run it from the repository root. Ends like a test
# program.
cc=${CC:-cc}
flags="-std=c11 -D_POSIX_C_SOURCE=200809L -fno-pic -fno-pie"
work=${BUILD:-build}/symbols
passed=0 failed=0 skipped=0

# Functions that a call may reach. The header's own exp is no libm's, so expf is not among them;
# bcmp is clang's memcmp; the last two lines are the compiler's: stack protector, 64-bit arithmetic.
allowed='fmaf|sqrt|sqrtf|fabs|fabsf|memcpy|memmove|memset|memcmp|bcmp'
allowed="$allowed|__stack_chk_fail|__stack_chk_fail_local|__stack_chk_guard|_GLOBAL_OFFSET_TABLE_"
allowed="$allowed|__u?(div|mod|mul)di3|__aeabi_[a-z0-9]*|__atomic_fetch_add_[48]"

summary() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}

# check NAME LIST: passes when the list is empty.
check() {
    if [ -z "$2" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $1:" $2
    fi
}

compile() { # OBJECT FLAGS, the source from standard input
    object=$1
    shift
    "$cc" $flags "$@" -I. -x c -c -o "$object" - && return 0
    failed=$((failed + 1))
    echo "FAIL $object: does not compile"
    return 1
}

# nm prints "name" or "address type name"; some systems put one _ before every C name.
undefined() { nm -u "$1" | awk 'NF { print $NF }' | sed 's/^_\([a-z]\)/\1/'; }
exported() { nm -g "$1" | awk 'NF == 3 && $2 != "U" { print $3 }' | sed 's/^_\([a-z]\)/\1/'; }
writable() { nm "$1" | awk 'NF == 3 && $2 ~ /^[BbDdCGgSs]$/ { print $3 }'; }

if ! command -v nm >/dev/null 2>&1; then
    echo "SKIP symbols: there is no nm"
    skipped=1
    summary
fi
mkdir -p "$work" || exit 2

for level in -O0 -O2; do
    for name in kda attnres; do
        upper=$(echo "$name" | tr '[:lower:]' '[:upper:]')
        object=$work/$name$level.o
        case="$name.h at $level"
        printf '#define %s_IMPLEMENTATION\n#include "%s.h"\n' "$upper" "$name" |
            compile "$object" "$level" || continue
        check "$case needs" "$(undefined "$object" | grep -v -x -E "$allowed")"
        check "$case exports without prefix" "$(exported "$object" | grep -v "^${name}_")"
        # The choice of kernels, made once, is the one thing that is written.
        check "$case has writable data" "$(writable "$object" | grep -v -x -E '([a-z]*_best\.)?best(\.[0-9]*)?')"
        functions=$(exported "$object" | wc -l)
        [ "$functions" -gt 5 ] && few= || few="$functions functions"
        check "$case exports too little to be all of it" "$few"
        object=$work/$name-static$level.o
        printf '#define %s_STATIC\n#define %s_IMPLEMENTATION\n#include "%s.h"\nint unused;\n' \
            "$upper" "$upper" "$name" | compile "$object" "$level" || continue
        check "$case, static, needs" "$(undefined "$object" | grep -v -x -E "$allowed")"
        check "$case, static, exports" "$(exported "$object" | grep -v -x unused)"
    done
done
summary
