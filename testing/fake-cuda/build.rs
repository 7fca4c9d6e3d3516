//! Gives the shared library the name under which drivers are looked up once it is loaded.
//!
//! The file keeps its own name, so that no search finds it: it answers to `libcuda.so.1` only in
//! a process that loaded it by its path.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[expect(clippy::disallowed_methods, reason = "how Cargo names the target")]
    let system = std::env::var("CARGO_CFG_TARGET_OS");
    if system.as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    }
}
