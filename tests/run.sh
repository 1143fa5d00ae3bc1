#!/bin/sh
# Runs the test programs named as arguments, from the repository root, and adds up their counts: as
# many at a time as there are processors, or as TEST_JOBS says; each one's lines come together when
# it has ended. A program that ends without its closing line, or with a failing status and no failed
# case, counts as one failure. The last line is the sum; the exit status is 0 only if nothing failed
# and something passed. RUNNER may be a command that runs programs of another machine, and EXE what
# their names end in.
logs=${BUILD:-build}/logs

if [ "$1" = --one ]; then # into its log, then what is to be shown of it
    name=$(basename "$2")
    log=$logs/$name
    begin=$(date +%s)
    $RUNNER "$2$EXE" >"$log" 2>&1
    status=$?
    counts=$(tail -n 1 "$log" | tr -d '\r' |
        sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p')
    if [ -z "$counts" ]; then
        counts='0 1 0'
        echo "FAIL $2: no closing line, exit status $status" >>"$log"
    elif [ "$status" -ne 0 ] && [ "$(echo "$counts" | cut -d' ' -f2)" -eq 0 ]; then
        counts=$(echo "$counts" | awk '{ print $1, $2 + 1, $3 }')
        echo "FAIL $2: exit status $status" >>"$log"
    fi
    echo "$counts" >"$log.counts"
    if [ "$status" -ne 0 ] || [ -n "$VERBOSE" ] || grep -q '^FAIL' "$log"; then
        shown=$(cat "$log")
    else
        shown=$(grep '^SKIP' "$log"; tail -n 1 "$log")
    fi
    printf '== %s, %d s\n%s\n' "$name" $(($(date +%s) - begin)) "$shown"
    exit 0
fi

rm -rf "$logs"
mkdir -p "$logs"
export logs BUILD RUNNER EXE VERBOSE
printf '%s\n' "$@" |
    xargs -P "${TEST_JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)}" -I{} sh "$0" --one {}
passed=0 failed=0 skipped=0
for program in "$@"; do
    read -r p f s <"$logs/$(basename "$program").counts" || p=0 f=1 s=0
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
