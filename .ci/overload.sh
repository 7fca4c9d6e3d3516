# shellcheck shell=bash disable=SC2154
# Overload of a proxy under a memory limit, for .ci/docker and .ci/image, which source this: load, and
# what must hold. They bring `fail`, `await`, `alive` (the process runs), and say where it listens
# ($PORT), where to put files ($scratch).

get() { curl -sS --max-time 30 "$@"; }

# figure NAME [PART]: one number of /memory, the first of that name, or the first in that part.
figure() {
    get -H 'Accept: application/json' "http://127.0.0.1:$PORT/memory" |
        awk -v name="\"$1\":" -v part="${2:+\"$2\":}" '
            $1 == part || part == "" { within = 1 }
            within && $1 == name && !seen { seen = 1; print $2 + 0 }'
}

is_at_most() { [ "$1" -le "$2" ]; }

ready() { curl -sf --max-time 2 -o /dev/null "http://127.0.0.1:$PORT/readyz"; }

# embed: one request to the model; its status. embed_answer shows its body.
embed() {
    curl -sS --max-time 60 -o "$scratch/embed" -w '%{http_code}' -H 'Content-Type: application/json' \
        -d '{"texts": ["the sea goes out"]}' "http://127.0.0.1:$PORT/embed"
}

embed_answer() { head -c 400 "$scratch/embed" 2>/dev/null || true; }

model_is_gone() { is_at_most "$(figure committed_bytes)" 0; }

fell_to() { is_at_most "$(figure physical_bytes)" "$1"; }

KIB=1024
BODY_KIB=256
# What a text of that size is booked with by the proxy and its text service.
COST_KIB=$((BODY_KIB * 10 + 256 + 128))

# overload LIMIT_MIB SECONDS: as many clients as would fill the whole ceiling four times over, each
# of which asks again at once. Writes a line for each answer: its status, and Retry-After.
overload() {
    local clients=$(($1 * KIB * 4 * 80 / 100 / COST_KIB)) end=$((SECONDS + $2))
    awk -v size=$((BODY_KIB * KIB)) 'BEGIN { srand(7); for (n = 0; n < size; n += length(w) + 1) {
        w = sprintf("w%x", int(rand() * 2000)); printf "%s ", w } }' >"$scratch/body"
    echo "$clients clients, texts of $BODY_KIB KiB"
    : >"$scratch/answers"
    while [ "$SECONDS" -lt "$end" ]; do
        curl -sS --no-progress-meter -Z --parallel-immediate --parallel-max "$clients" --max-time 120 -o /dev/null \
            -w '%{http_code} %header{retry-after}\n' -H 'Expect:' -H 'Content-Type: text/plain' \
            --data-binary "@$scratch/body" \
            "http://127.0.0.1:$PORT/words?[1-$((clients * 8))]" >>"$scratch/answers" 2>>"$scratch/errors"
    done
}

# survives LIMIT_MIB SECONDS UNLOAD_S: serves, loads, lives through the overload with its model,
# unloads it when it has been idle, for UNLOAD_S at most, and loads it again. Prints figures `low_memory.LIMIT_MIB.*`.
survives() {
    local limit=$1 load now peak=0 status embedded=0 refused=0 served shed
    await "it is ready" ready
    [ "$(figure limit_bytes host)" = $((limit << 20)) ] || fail "the limit is not seen"
    echo "at rest: physical $(figure physical_bytes)"
    [ "$(embed)" = 200 ] || fail "the model does not load: $(embed_answer)"
    echo "with the model: physical $(figure physical_bytes)"
    overload "$limit" "$2" &
    load=$!
    while kill -0 "$load" 2>/dev/null; do
        now=$(figure physical_bytes || echo 0)
        if [ "${now:-0}" -gt "$peak" ]; then peak=$now; fi
        status=$(embed || true)
        case "$status" in
        200) embedded=$((embedded + 1)) ;;
        503) refused=$((refused + 1)) ;;
        *) fail "/embed under overload: status $status: $(embed_answer)" ;;
        esac
        sleep 0.2
    done
    wait "$load" || fail "the load did not end well: $(tail -n 1 "$scratch/errors")"
    alive || fail "it died"
    served=$(grep -c '^200' "$scratch/answers" || true)
    shed=$(grep -c '^503 [0-9]' "$scratch/answers" || true)
    echo "$served answered 200, $shed answered 503 with Retry-After;" \
        "/embed: $embedded answered 200, $refused 503; correction factor $(figure correction_factor host)"
    [ "$served" -gt 0 ] || fail "nothing was answered 200"
    [ "$shed" -gt 0 ] || fail "nothing was shed: that was no overload"
    if grep -vq -e '^200' -e '^503 [0-9]' "$scratch/answers"; then
        sort "$scratch/answers" | uniq -c
        fail "an answer is neither 200 nor 503 with Retry-After"
    fi
    printf 'figure low_memory.%s.served %s requests\n' "$limit" "$served"
    printf 'figure low_memory.%s.shed %s requests\n' "$limit" "$shed"
    printf 'figure low_memory.%s.physical_peak %s bytes\n' "$limit" "$peak"
    # The model's 64 MiB stay until it is idle; 24 MiB for everything else.
    await "memory falls back" fell_to $(((64 + 24) << 20))
    printf 'figure low_memory.%s.physical_after %s bytes\n' "$limit" "$(figure physical_bytes)"
    PATIENCE_S=$3 await "the idle model goes" model_is_gone
    await "memory falls back" fell_to $((24 << 20))
    printf 'figure low_memory.%s.physical_unloaded %s bytes\n' "$limit" "$(figure physical_bytes)"
    [ "$(embed)" = 200 ] || fail "the model does not load again: $(embed_answer)"
    is_at_most 2 "$(figure loads)" || fail "the model was not loaded twice"
}
