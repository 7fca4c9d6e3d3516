# The example proxy as an image: small, without root, set for least memory. Build it with BuildKit
# (Docker 20.10 or newer: DOCKER_BUILDKIT=1 docker build -t lowtide-proxy .); see docs/DEPLOYING.md.

FROM rust:1.95-bookworm AS build
WORKDIR /build
COPY . .
# Debug information and names are left out. The files are touched because Cargo goes by their times:
# the cached folder may hold a younger build of other sources, which would pass for this one.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/build/target \
    find . -path ./target -prune -o -type f -exec touch {} + \
    && CARGO_PROFILE_RELEASE_DEBUG=0 CARGO_PROFILE_RELEASE_STRIP=symbols \
    cargo build --release --locked --example proxy \
    && deploy/image-root target/release/examples/proxy /image

# Nothing but what is needed: the binary, the C library and its loader, a user without rights.
FROM scratch
LABEL org.opencontainers.image.title="lowtide-proxy" \
      org.opencontainers.image.description="A reverse proxy that returns unused memory" \
      org.opencontainers.image.licenses="MIT OR Apache-2.0"
COPY --from=build /image/ /

# LOWTIDE_PROFILE moves what can move while the process runs. Arena count, thread caches and block
# layout are fixed before main, from a string in the binary (the example carries the balanced one)
# and after it from this variable, which wins. It is HeapProfile::LowMemory.conf() to the letter; a
# test compares them. Both are needed: either alone leaves half of the profile behind.
ENV LOWTIDE_PROFILE=low-memory \
    _RJEM_MALLOC_CONF=background_thread:true,max_background_threads:1,narenas:2,dirty_decay_ms:1000,muzzy_decay_ms:0,thp:never,metadata_thp:disabled,cache_oblivious:false

# jemalloc serves Rust alone. What C code in the process allocates lies in glibc's heap, which would
# have up to eight arenas for each core, and never gives their inner pages back by itself.
ENV MALLOC_ARENA_MAX=2

# Read by NVIDIA's container toolkit, and by nobody where there is none: libcuda and NVML.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# An orderly end takes PROXY_DRAIN, PROXY_GRACE and at most 5 s more; `docker stop` kills after 10 s.
# Operators have a port of their own: clients that take all connections do not keep health checks
# waiting, and whoever publishes the first port does not publish /memory and verbs.
ENV PROXY_LISTEN=0.0.0.0:8080 \
    PROXY_OPERATORS=0.0.0.0:8081 \
    PROXY_DRAIN=1s \
    PROXY_GRACE=3s \
    NO_COLOR=1

USER 10001:10001
EXPOSE 8080 8081
STOPSIGNAL SIGTERM
# /healthz never fails for pressure: a busy service is not restarted for being busy.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s --retries=3 \
    CMD ["/usr/local/bin/proxy", "healthcheck"]
ENTRYPOINT ["/usr/local/bin/proxy"]
