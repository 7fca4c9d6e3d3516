#!/usr/bin/env bash
# nvcc without a compiler: programs for the device are a line that the fake driver takes, and
# libraries are empty.
set -euo pipefail

output=""
folder=""
kind=""
previous=""
for word in "$@"; do
    case "$previous" in
        -o) output="$word" ;;
        --output-directory) folder="$word" ;;
    esac
    case "$word" in
        --ptx | --lib | -c) kind="$word" ;;
        --version)
            printf '\n\n\nCuda compilation tools, release 12.8, V12.8.0\n'
            exit 0
            ;;
    esac
    previous="$word"
done
case "$kind" in
    --ptx) printf '.version 8.0\n' >"$folder/$(basename "$previous" .cu).ptx" ;;
    -c) echo | cc -x c -c -o "$output" - ;;
    --lib) rm -f "$output" && ar rcs "$output" ;;
esac
