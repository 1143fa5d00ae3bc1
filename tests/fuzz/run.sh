#!/bin/sh
# Runs the fuzz targets named as arguments, each a program of clang -fsanitize=fuzzer, as many at once
# as there are processors, for FUZZ_SECONDS each, from the repository root. What is found (crash-*,
# leak-*, timeout-*, oom-*), new inputs and logs stay beside the program. The last line counts the
# targets; the exit status is 0 only if none found anything.
export FUZZ_SECONDS="${FUZZ_SECONDS:-60}"
# No input may take 10 seconds or a gibibyte. AddressSanitizer keeps what inputs before it freed, by
# default more than that.
export ASAN_OPTIONS="${ASAN_OPTIONS:+$ASAN_OPTIONS:}quarantine_size_mb=16"
printf '%s\n' "$@" | xargs -P "${FUZZ_JOBS:-$(getconf _NPROCESSORS_ONLN)}" -I{} sh -c '
    program={} name=$(basename {})
    mkdir -p "$program-corpus"
    "$program" -max_total_time="$FUZZ_SECONDS" -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 \
        -max_len=16384 -dict=tests/fuzz/words.dict -artifact_prefix="$program-" \
        "$program-corpus" "tests/fuzz/corpus/$name" >"$program.log" 2>&1
    status=$?
    runs=$(sed -n "s/^stat::number_of_executed_units: *//p" "$program.log")
    most=$(sed -n "s/^stat::peak_rss_mb: *//p" "$program.log")
    seen=$(sed -n "s/.*\(cov: [0-9]* ft: [0-9]*\).*/\1/p" "$program.log" | tail -n 1)
    if [ $status -eq 0 ]; then
        echo "$name: $runs executions, $seen, $most MiB"
    else
        echo "FAIL $name: $runs executions, $seen, $most MiB, exit status $status: $program.log"
        grep -E "promised:|runtime error|ERROR|SUMMARY|Test unit written" "$program.log"
    fi' >"${1%/*}/summary"
cat "${1%/*}/summary"
failed=$(grep -c '^FAIL' "${1%/*}/summary")
passed=$(($(grep -c ' executions' "${1%/*}/summary") - failed))
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ] && [ "$passed" -eq $# ]
