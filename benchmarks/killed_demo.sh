#!/usr/bin/env bash
# The README's output: the demo is stopped with Ctrl+C in layer 8, killed in layer 13, and finished; each run's words follow.
# Usage: benchmarks/killed_demo.sh EMPTY_DIRECTORY
set -euo pipefail
mkdir -p "$1" && cd "$1"
export PREFECT_HOME="$PWD/prefect"

# stopped SIGNAL LAYER: run the demo in a process group of its own and signal the group two seconds after that layer.
stopped() {
    setsid prefect-quantize demo >words 2>&1 &
    local run=$!
    until grep -q "layer $2 of" words; do kill -0 $run && sleep 0.2; done
    sleep 2
    kill "-$1" -- "-$run"
    local code=0
    wait $run || code=$?
    printf '$ prefect-quantize demo\n%s\n$ echo $?\n%s\n\n' "$(cat words)" "$code"
}

stopped INT 7
stopped KILL 12
printf '$ prefect-quantize demo\n'
prefect-quantize demo 2>&1
