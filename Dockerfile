# The example proxy as a small image without root, with the low-memory profile. Build with BuildKit
# (Docker 20.10 or newer: DOCKER_BUILDKIT=1 docker build -t lowtide-proxy .). See docs/DEPLOYING.md.

FROM rust:1.95-bookworm AS build
WORKDIR /build
COPY . .
# Symbol names stay, for heap profiles; the profiler runs from the start.
#
# The files are touched because Cargo compares file times: the cached target folder may contain a newer
# build of other sources.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/build/target \
    find . -path ./target -prune -o -type f -exec touch {} + \
    && CARGO_PROFILE_RELEASE_STRIP=debuginfo \
    cargo build --release --locked --example proxy --features cuda,profiling \
    && deploy/image-root target/release/examples/proxy /image

# Only the binary, the C library and its loader, and an unprivileged user.
FROM scratch
LABEL org.opencontainers.image.title="lowtide-proxy" \
      org.opencontainers.image.description="A reverse proxy that returns unused memory" \
      org.opencontainers.image.licenses="MIT OR Apache-2.0"
COPY --from=build /image/ /

# Both halves of the low-memory profile. LOWTIDE_PROFILE sets everything that can change at run time.
# Arena count, thread caches and block layout are fixed before main: from a string in the binary (the
# example has the balanced one), which _RJEM_MALLOC_CONF overrides. Its value is
# HeapProfile::LowMemory.conf(); a test compares them.
ENV LOWTIDE_PROFILE=low-memory \
    _RJEM_MALLOC_CONF=background_thread:true,max_background_threads:1,narenas:2,dirty_decay_ms:1000,muzzy_decay_ms:0,thp:never,metadata_thp:disabled,cache_oblivious:false

# Why the last run ended, also if it was killed, and heap profiles taken as memory grows: both outlive
# the process on this volume. A start that cannot write them reports that and goes on.
ENV LOWTIDE_FLIGHT_RECORDER=/var/lib/lowtide/recording \
    LOWTIDE_HEAP_PROFILE_DIR=/var/lib/lowtide/profiles
VOLUME /var/lib/lowtide
# With LOWTIDE_SPILL_DIR=/var/lib/lowtide, polls that outgrow the limit go on in a file there.

# jemalloc serves Rust code only. C code allocates from glibc's heap, which would have up to eight
# arenas per core and never releases their inner pages by itself.
ENV MALLOC_ARENA_MAX=2

# For NVIDIA's container toolkit, if there is one: mount libcuda and NVML.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Shutdown takes PROXY_DRAIN, PROXY_GRACE and at most 5 s more; `docker stop` kills after 10 s.
# Operators use a separate port, so that clients that hold all connections cannot delay health
# checks, and publishing the first port does not publish /memory and admin commands.
ENV PROXY_LISTEN=0.0.0.0:8080 \
    PROXY_OPERATORS=0.0.0.0:8081 \
    PROXY_DRAIN=1s \
    PROXY_GRACE=3s \
    NO_COLOR=1

USER 10001:10001
EXPOSE 8080 8081
STOPSIGNAL SIGTERM
# /healthz never fails because of pressure, so a busy service is not restarted; it fails if a policy
# asks for a restart (LOWTIDE_EXHAUSTION_POLICY, not set here: there may be no supervisor).
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s --retries=3 \
    CMD ["/usr/local/bin/proxy", "healthcheck"]
ENTRYPOINT ["/usr/local/bin/proxy"]
