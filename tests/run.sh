#!/bin/sh
# Runs the test programs named as arguments, from the repository root, and adds up their counts.
# A program that ends without its closing line, or with a failing status and no failed case, counts
# as one failure. The last line is the sum; the exit status is 0 only if nothing failed and
# something passed. RUNNER may be a command that runs programs of another machine, and
# EXE what their names end in.
passed=0 failed=0 skipped=0
log=${BUILD:-build}/test.log
mkdir -p "$(dirname "$log")"
for program in "$@"; do
    echo "== $(basename "$program")"
    $RUNNER "$program$EXE" >"$log" 2>&1
    status=$?
    last=$(tail -n 1 "$log" | tr -d '\r')
    counts=$(echo "$last" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p')
    if [ -z "$counts" ]; then
        cat "$log"
        echo "FAIL $program: no closing line, exit status $status"
        failed=$((failed + 1))
        continue
    fi
    set -- $counts
    if [ "$status" -ne 0 ] && [ "$2" -eq 0 ]; then
        echo "FAIL $program: exit status $status"
        failed=$((failed + 1))
    fi
    if [ "$status" -ne 0 ] || [ -n "$VERBOSE" ]; then
        cat "$log"
    else
        grep '^SKIP' "$log"
        echo "$last"
    fi
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
