//! Gives the library the name of NVML, and the fake driver as the library that it stands for.
//!
//! A filter (`DT_FILTER`) has no functions of its own: the loader looks in the other library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[expect(clippy::disallowed_methods, reason = "how Cargo names the target")]
    let system = std::env::var("CARGO_CFG_TARGET_OS");
    if system.as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
        println!("cargo:rustc-cdylib-link-arg=-Wl,--filter=libcuda.so.1");
    }
}
