//! Gives the shared library the name under which drivers are looked up once it is loaded.
//!
//! The file keeps its own name, so that no search finds it: it answers to `libcuda.so.1` only in
//! a process that loaded it by its path.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
