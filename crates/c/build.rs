//! Gives the shared library its name for the dynamic linker, and keeps it loaded.
//!
//! The number in the name is `LOWTIDE_ABI_MAJOR`. A thread of the library releases idle memory
//! until the process ends, so `dlclose` must not unmap its code.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[expect(clippy::disallowed_methods, reason = "how Cargo names the target")]
    let system = std::env::var("CARGO_CFG_TARGET_OS");
    if system.as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,liblowtide_c.so.1");
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}
