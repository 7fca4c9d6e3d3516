//! jemalloc's controls as typed values: looked up by name once, then read and written by number.
//!
//! The table below lists every control that this crate uses with its C type; no other code can
//! create a [`Key`]. No call allocates from the heap it controls: names are static, and the numbers
//! are stored in place. (A control path that allocates would disturb its own measurement, and
//! refill the caches it has just emptied.) It has no policy and no other state.
//!
//! Invariant: `len(numbers) = components of the name`, checked at compile time.
#![expect(unsafe_code, reason = "jemalloc's control interface is untyped C")]

#[cfg(feature = "profiling")]
use std::ffi::c_uint;
use std::ffi::{CStr, CString, c_char, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use tikv_jemalloc_sys::{extent_hooks_t, mallctlbymib, mallctlnametomib};

use super::error::HostError;

/// A control whose value has type `T` (`()` for one that is performed, `Text` for a string), and
/// whose name has `N` components.
pub(crate) struct Key<T, const N: usize> {
    name: &'static CStr,
    numbers: OnceLock<[usize; N]>,
    value: PhantomData<fn() -> T>,
}

/// Arena indices are below this (`MALLOCX_ARENA_LIMIT`, 2^12 - 1).
pub(crate) const ARENA_LIMIT: u32 = (1 << 12) - 1;

/// The maximum length of an arena's name in bytes: jemalloc's 32 minus the NUL.
pub const ARENA_NAME_MAX: usize = 31;

/// Marks a control whose value is a C string that lives as long as the process.
pub(crate) struct Text;

/// Marks a control whose value is a C string that a program could overwrite later.
pub(crate) struct Copied;

/// Marks a control to which the name of a file is written.
#[cfg(feature = "profiling")]
pub(crate) struct FileName;

/// A function that stores at most the given number of return addresses of the calling thread at the
/// first pointer, and their number at the second.
#[cfg(feature = "profiling")]
pub(crate) type BacktraceHook = unsafe extern "C" fn(*mut *mut c_void, *mut c_uint, c_uint);

/// A function that jemalloc calls on a thread each time it has allocated `step` bytes more
/// (`user_hook_object_t` of jemalloc 5.3.1).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ThreadEvent {
    /// Called within an allocation, with the thread's allocated and freed bytes.
    pub(crate) call: unsafe extern "C" fn(bool, u64, u64),
    pub(crate) step: u64,
    pub(crate) is_alloc_only: bool,
}

/// The hooks of a new arena (`arena_config_t` of jemalloc 5.3.1).
#[repr(C)]
pub(crate) struct ArenaConfig {
    pub(crate) hooks: *mut extent_hooks_t,
    pub(crate) metadata_use_hooks: bool,
}

/// Kinds of text that C gives a pointer to.
pub(crate) trait Pointed {}
impl Pointed for Text {}
impl Pointed for Copied {}

/// Types of which each value that jemalloc writes is valid: numbers, addresses, and functions, which
/// are never null.
pub(crate) trait Readable: Copy {}
impl<T: Number> Readable for T {}
impl<T> Readable for Option<NonNull<T>> {}
impl<T> Readable for *mut T {}
#[cfg(feature = "profiling")]
impl Readable for BacktraceHook {}

/// Types that are plain numbers to C as to Rust.
pub(crate) trait Number: Copy {}
impl Number for bool {}
impl Number for u32 {}
impl Number for u64 {}
impl Number for usize {}
impl Number for isize {}

/// The table. Types from jemalloc 5.3.1's manual, section "MALLCTL NAMESPACE", and `ctl.c`:
/// `size_t` is usize, `ssize_t` isize, `unsigned` u32, `uint64_t` u64, `const char *` [`Text`] or
/// [`Copied`].
/// 4096 stands for all arenas (`MALLCTL_ARENAS_ALL`).
macro_rules! table {
    ($($key:ident: $value:ty, $components:literal, $name:literal;)*) => {
        $(pub(crate) static $key: Key<$value, $components> = Key::new($name);)*
    };
}

table! {
    EPOCH: u64, 1, c"epoch";
    VERSION: Text, 1, c"version";
    CONFIG_STATS: bool, 2, c"config.stats";
    CONFIG_PROF: bool, 2, c"config.prof";
    OPT_PROF: bool, 2, c"opt.prof";
    PROF_ACTIVE: bool, 2, c"prof.active";
    PROF_LG_SAMPLE: usize, 2, c"prof.lg_sample";
    BACKGROUND_THREAD: bool, 1, c"background_thread";
    MAX_BACKGROUND_THREADS: usize, 1, c"max_background_threads";

    THREAD_ALLOCATED: u64, 2, c"thread.allocated";
    THREAD_DEALLOCATED: u64, 2, c"thread.deallocated";
    THREAD_ALLOCATED_AT: Option<NonNull<u64>>, 2, c"thread.allocatedp";
    THREAD_DEALLOCATED_AT: Option<NonNull<u64>>, 2, c"thread.deallocatedp";
    THREAD_PEAK: u64, 3, c"thread.peak.read";
    THREAD_PEAK_RESET: (), 3, c"thread.peak.reset";
    THREAD_ARENA: u32, 2, c"thread.arena";
    THREAD_CACHE_FLUSH: (), 3, c"thread.tcache.flush";
    THREAD_EVENT: ThreadEvent, 3, c"experimental.hooks.thread_event";

    ARENAS_COUNT: u32, 2, c"arenas.narenas";
    ARENAS_PAGE: usize, 2, c"arenas.page";
    ARENAS_DIRTY_DECAY: isize, 2, c"arenas.dirty_decay_ms";
    ARENAS_MUZZY_DECAY: isize, 2, c"arenas.muzzy_decay_ms";
    ARENA_DIRTY_DECAY: isize, 3, c"arena.0.dirty_decay_ms";
    ARENA_MUZZY_DECAY: isize, 3, c"arena.0.muzzy_decay_ms";
    ARENAS_CREATE: u32, 2, c"arenas.create";
    ARENAS_CREATE_WITH: ArenaConfig, 2, c"experimental.arenas_create_ext";
    ARENA_GROWTH_MAX: usize, 3, c"arena.0.retain_grow_limit";
    ARENA_ACTIVE_AT: Option<NonNull<usize>>, 4, c"experimental.arenas.0.pactivep";
    ARENA_NAME: Text, 3, c"arena.0.name";
    ARENA_HOOKS: *mut extent_hooks_t, 3, c"arena.0.extent_hooks";
    ARENA_PURGE: (), 3, c"arena.0.purge";
    ARENA_DESTROY: (), 3, c"arena.0.destroy";
    ARENAS_PURGE: (), 3, c"arena.4096.purge";
    ARENAS_DECAY: (), 3, c"arena.4096.decay";

    STATS_ALLOCATED: usize, 2, c"stats.allocated";
    STATS_ACTIVE: usize, 2, c"stats.active";
    STATS_METADATA: usize, 2, c"stats.metadata";
    STATS_RESIDENT: usize, 2, c"stats.resident";
    STATS_MAPPED: usize, 2, c"stats.mapped";
    STATS_UNBACKED: usize, 2, c"stats.retained";
    STATS_THREADS: usize, 3, c"stats.background_thread.num_threads";
    STATS_DIRTY_PAGES: usize, 4, c"stats.arenas.4096.pdirty";
    STATS_MUZZY_PAGES: usize, 4, c"stats.arenas.4096.pmuzzy";
    STATS_THREAD_CACHES: usize, 4, c"stats.arenas.4096.tcache_bytes";
    STATS_ARENA_ACTIVE_PAGES: usize, 4, c"stats.arenas.0.pactive";
    STATS_ARENA_DIRTY_PAGES: usize, 4, c"stats.arenas.0.pdirty";
    STATS_ARENA_MUZZY_PAGES: usize, 4, c"stats.arenas.0.pmuzzy";
    STATS_ARENA_UNBACKED: usize, 4, c"stats.arenas.0.retained";
    STATS_ARENA_SMALL: usize, 5, c"stats.arenas.0.small.allocated";
    STATS_ARENA_LARGE: usize, 5, c"stats.arenas.0.large.allocated";
    STATS_ARENA_CACHED: usize, 4, c"stats.arenas.0.tcache_bytes";
    ARENAS_CLASSES: u32, 2, c"arenas.nbins";
    CLASS_SIZE: usize, 4, c"arenas.bin.0.size";
    CLASS_GROUP_BYTES: usize, 4, c"arenas.bin.0.slab_size";
    CLASS_GROUP_BLOCKS: u32, 4, c"arenas.bin.0.nregs";
    STATS_CLASS_BLOCKS: usize, 6, c"stats.arenas.4096.bins.0.curregs";
    STATS_CLASS_GROUPS: usize, 6, c"stats.arenas.4096.bins.0.curslabs";
    APPROXIMATE_ACTIVE: usize, 2, c"approximate_stats.active";

    OPT_ARENAS: u32, 2, c"opt.narenas";
    OPT_THREAD_CACHE: bool, 2, c"opt.tcache";
    OPT_THREAD_CACHE_MAX: usize, 2, c"opt.tcache_max";
    OPT_THREAD_CACHE_SMALL_MIN: u32, 2, c"opt.tcache_nslots_small_min";
    OPT_THREAD_CACHE_LARGE: u32, 2, c"opt.tcache_nslots_large";
    OPT_THP: Text, 2, c"opt.thp";
    OPT_METADATA_THP: Text, 2, c"opt.metadata_thp";
    OPT_CACHE_OBLIVIOUS: bool, 2, c"opt.cache_oblivious";
    OPT_PERCPU_ARENA: Text, 2, c"opt.percpu_arena";
    OPT_HPA: bool, 2, c"opt.hpa";
    OPT_RETAIN: bool, 2, c"opt.retain";
    OPT_MAX_BACKGROUND_THREADS: usize, 2, c"opt.max_background_threads";
    CONFIG_CONF: Text, 2, c"config.malloc_conf";
    OPT_CONF_FROM_BINARY: Text, 3, c"opt.malloc_conf.global_var";
    OPT_CONF_FROM_SYMLINK: Copied, 3, c"opt.malloc_conf.symlink";
    OPT_CONF_FROM_VARIABLE: Copied, 3, c"opt.malloc_conf.env_var";
    OPT_CONF_FROM_HARDER: Text, 3, c"opt.malloc_conf.global_var_2_conf_harder";
}

#[cfg(feature = "profiling")]
pub(crate) static PROF_DUMP: Key<FileName, 2> = Key::new(c"prof.dump");
#[cfg(feature = "profiling")]
pub(crate) static PROF_BACKTRACE: Key<BacktraceHook, 3> =
    Key::new(c"experimental.hooks.prof_backtrace");

impl<T, const N: usize> Key<T, N> {
    const fn new(name: &'static CStr) -> Self {
        assert!(components(name) == N, "a control's name has another number of components");
        Self { name, numbers: OnceLock::new(), value: PhantomData }
    }

    /// The control's name.
    pub(crate) fn name(&self) -> &'static str {
        self.name.to_str().unwrap_or("a control whose name is no text")
    }

    /// The numbers that stand for the name; about 200 ns the first time.
    #[inline]
    fn numbers(&self) -> Result<&[usize; N], HostError> {
        self.numbers.get().map_or_else(|| self.find(), Ok)
    }

    #[cold]
    fn find(&self) -> Result<&[usize; N], HostError> {
        let mut numbers = [0; N];
        match numbers_of(self.name, &mut numbers) {
            0 => Ok(self.numbers.get_or_init(|| numbers)),
            code => Err(self.refused("find", code)),
        }
    }

    fn refused(&self, act: &'static str, code: i32) -> HostError {
        HostError::Mallctl { name: self.name(), act, code }
    }

    /// Reads a value, and writes another one if there is one.
    ///
    /// # Safety
    /// The numbers are those of this control, for an arena's index below [`ARENA_LIMIT`]. The table
    /// gives the control's C type, and it is `V`: each value that jemalloc writes is valid.
    unsafe fn read_raw<V>(&self, numbers: &[usize], new: Option<V>) -> Result<V, HostError> {
        let (mut value, mut size) = (MaybeUninit::<V>::uninit(), size_of::<V>());
        let act = if new.is_some() { "write" } else { "read" };
        let mut new = new.map(MaybeUninit::new);
        let (at, length) = place_of(new.as_mut());
        // SAFETY: the numbers are a control's (contract of this function). It writes one value of
        // this size and reads as much; another size is refused with EINVAL.
        let code = unsafe {
            let to = value.as_mut_ptr().cast();
            mallctlbymib(numbers.as_ptr(), numbers.len(), to, &raw mut size, at, length)
        };
        match code {
            // SAFETY: jemalloc wrote it, and every such value is valid (contract of this function).
            0 => Ok(unsafe { value.assume_init() }),
            code => Err(self.refused(act, code)),
        }
    }

    /// Writes a value, or triggers the control's action if there is none.
    ///
    /// # Safety
    /// As for `read_raw`; and the value, or the action, is correct for the control.
    unsafe fn write_raw<V>(&self, numbers: &[usize], new: Option<V>) -> Result<(), HostError> {
        let act = if new.is_some() { "write" } else { "perform" };
        let mut new = new.map(MaybeUninit::new);
        let (at, length) = place_of(new.as_mut());
        let null = ptr::null_mut();
        // SAFETY: as in `read_raw`; null pointers and a length of 0 mean that nothing is read and
        // nothing written.
        let code =
            unsafe { mallctlbymib(numbers.as_ptr(), numbers.len(), null, null.cast(), at, length) };
        if code == 0 { Ok(()) } else { Err(self.refused(act, code)) }
    }
}

/// Returns the address and the size of a value; null and 0 for none.
fn place_of<V>(value: Option<&mut MaybeUninit<V>>) -> (*mut c_void, usize) {
    value.map_or((ptr::null_mut(), 0), |value| (value.as_mut_ptr().cast(), size_of::<V>()))
}

/// Looks a control up. Returns jemalloc's answer.
fn numbers_of(name: &CStr, numbers: &mut [usize]) -> i32 {
    let mut length = numbers.len();
    // SAFETY: a C string, and room for so many numbers.
    unsafe { mallctlnametomib(name.as_ptr(), numbers.as_mut_ptr(), &raw mut length) }
}

impl<T: Number, const N: usize> Key<T, N> {
    /// Writes the value.
    pub(crate) fn write(&self, value: T) -> Result<(), HostError> {
        self.write_by(self.numbers()?, value)
    }

    /// Writes the value and returns the control's value after it.
    pub(crate) fn exchange(&self, value: T) -> Result<T, HostError> {
        // SAFETY: the table gives the control's C type as `T`, for which every value that jemalloc
        // writes is valid (its `bool` is C's, 0 or 1).
        unsafe { self.read_raw(self.numbers()?, Some(value)) }
    }

    fn write_by(&self, numbers: &[usize; N], value: T) -> Result<(), HostError> {
        // SAFETY: as in `read_by`: the control expects a `T`.
        unsafe { self.write_raw(numbers, Some(value)) }
    }

    /// Writes the value in one arena; refused as in `read_in`.
    pub(crate) fn write_in(&self, arena: u32, value: T) -> Result<(), HostError> {
        self.write_by(&self.numbers_with(1, arena)?, value)
    }
}

impl<T: Readable, const N: usize> Key<T, N> {
    /// The value. About 30 ns.
    #[inline]
    pub(crate) fn read(&self) -> Result<T, HostError> {
        self.read_by(self.numbers()?)
    }

    fn read_by(&self, numbers: &[usize; N]) -> Result<T, HostError> {
        // SAFETY: as in `exchange`. Numbers are those of a name, or have an arena's index below
        // jemalloc's limit in place (`numbers_with`), or that of a size class, which jemalloc
        // checks (`read_class`).
        unsafe { self.read_raw(numbers, None) }
    }

    /// The figure of one arena, for one named `stats.arenas.0.*`, of the last epoch. Refused where
    /// no arena was at the index then (ENOENT).
    pub(crate) fn read_of(&self, arena: u32) -> Result<T, HostError> {
        self.read_by(&self.numbers_with(2, arena)?)
    }

    /// The figure of one size class, for one named `*.bins.0.*` or `arenas.bin.0.*`; refused where
    /// there is no such class (ENOENT: `arenas_bin_i_index`, `stats_arenas_i_bins_j_index`).
    pub(crate) fn read_class(&self, class: u32) -> Result<T, HostError> {
        self.read_by(&self.numbers_with(N.saturating_sub(2), class)?)
    }

    /// Returns the value in one arena, for a control named `arena.0.*`. Refused if no arena is
    /// initialised at the index (EFAULT), except for the hooks: those are jemalloc's own then.
    pub(crate) fn read_in(&self, arena: u32) -> Result<T, HostError> {
        self.read_by(&self.numbers_with(1, arena)?)
    }
}

impl<T, const N: usize> Key<T, N> {
    /// The numbers with an index of an arena, or a smaller one of a size class, in this place.
    /// jemalloc 5.3.1 looks the arena up without checking the index (`arena_get` only asserts it,
    /// in debug builds), so it is checked here: the index for all arenas would read past the end of
    /// its table.
    fn numbers_with(&self, place: usize, index: u32) -> Result<[usize; N], HostError> {
        let mut numbers = *self.numbers()?;
        if index >= ARENA_LIMIT {
            return Err(HostError::NoSuchArena { index });
        }
        if let Some(number) = numbers.get_mut(place) {
            *number = index as usize;
        }
        Ok(numbers)
    }
}

impl<T: Pointed, const N: usize> Key<T, N> {
    /// Returns the address of the text; `None` if jemalloc has none.
    fn pointer(&self) -> Result<Option<NonNull<c_char>>, HostError> {
        // SAFETY: the table gives the control's C type as `const char *`; any pointer is valid.
        let text = unsafe { self.read_raw::<*mut c_char>(self.numbers()?, None) };
        text.map(NonNull::new)
    }
}

impl<const N: usize> Key<Text, N> {
    /// Returns the text; `None` if jemalloc has none, or none in UTF-8.
    pub(crate) fn read(&self) -> Result<Option<&'static str>, HostError> {
        let Some(text) = self.pointer()? else { return Ok(None) };
        // SAFETY: not null, and every `Text` of the table is a string literal inside jemalloc
        // (`version`, `config.malloc_conf`, names of modes) or the static string of one of the
        // process's `malloc_conf` symbols, which jemalloc has itself read up to its NUL.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        Ok(text.to_str().ok())
    }
}

impl<const N: usize> Key<Copied, N> {
    /// Returns a copy of the text; `None` if jemalloc has none. Invalid UTF-8 is replaced.
    pub(crate) fn copy(&self) -> Result<Option<String>, HostError> {
        let Some(text) = self.pointer()? else { return Ok(None) };
        // SAFETY: not null, and each `Copied` of the table is a string that jemalloc keeps a
        // pointer to while the process lives: its own copy of the link's name, which it never frees
        // (`malloc_init_hard_a0_locked`), or the result of `getenv` before `main`
        // (`obtain_malloc_conf`): a part of the block that the kernel put above the stack, which
        // stays and ends in NULs even if the environment is changed later. It is copied within this
        // call, so no reference remains to bytes that a program could overwrite.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        Ok(Some(text.to_string_lossy().into_owned()))
    }
}

impl Key<Text, 3> {
    /// Writes a text for one arena, which jemalloc copies: the only one that takes any is an
    /// arena's name, of at most 31 bytes and the NUL (`ARENA_NAME_LEN`).
    pub(crate) fn write_in(&self, arena: u32, text: &CStr) -> Result<(), HostError> {
        let numbers = self.numbers_with(1, arena)?;
        // SAFETY: the control takes a `const char *`, which is valid up to its NUL for the call;
        // jemalloc 5.3.1 copies at most `ARENA_NAME_LEN` bytes of it (`arena_name_set`).
        unsafe { self.write_raw(&numbers, Some(text.as_ptr())) }
    }
}

#[cfg(feature = "profiling")]
impl<const N: usize> Key<FileName, N> {
    /// Writes the name of a file, which jemalloc creates and fills within the call.
    pub(crate) fn write(&self, name: &CStr) -> Result<(), HostError> {
        // SAFETY: the control takes a `const char *`, which is valid up to its NUL for the call;
        // jemalloc 5.3.1 keeps no pointer to it (`prof_mdump`).
        unsafe { self.write_raw(self.numbers()?, Some(name.as_ptr())) }
    }
}

#[cfg(feature = "profiling")]
impl<const N: usize> Key<BacktraceHook, N> {
    /// Sets the function that jemalloc calls for each sample.
    ///
    /// # Safety
    /// The function is correct with the arguments of [`BacktraceHook`], on every thread, within an
    /// allocation.
    pub(crate) unsafe fn write(&self, hook: BacktraceHook) -> Result<(), HostError> {
        // SAFETY: the control takes such a function; the caller guarantees that it is correct.
        unsafe { self.write_raw(self.numbers()?, Some(hook)) }
    }
}

impl Key<ThreadEvent, 3> {
    /// Registers the function, for good.
    ///
    /// # Safety
    /// It may be called on every thread, within an allocation.
    pub(crate) unsafe fn write(&self, event: ThreadEvent) -> Result<(), HostError> {
        // SAFETY: the control takes such a value; the caller guarantees that the function is
        // correct.
        unsafe { self.write_raw(self.numbers()?, Some(event)) }
    }
}

impl Key<ArenaConfig, 2> {
    /// Creates an arena, and returns its index.
    ///
    /// # Safety
    /// The table and its functions are correct for jemalloc, and stay as long as the process.
    pub(crate) unsafe fn create(&self, mut config: ArenaConfig) -> Result<u32, HostError> {
        let (numbers, mut index, mut size) = (self.numbers()?, 0_u32, size_of::<u32>());
        let (to, from) = ((&raw mut index).cast(), (&raw mut config).cast());
        // SAFETY: the numbers are the control's, which reads such a value and writes an index; it
        // refuses other sizes. The caller guarantees that the table is valid.
        let code = unsafe {
            let length = size_of::<ArenaConfig>();
            mallctlbymib(numbers.as_ptr(), numbers.len(), to, &raw mut size, from, length)
        };
        if code == 0 { Ok(index) } else { Err(self.refused("write", code)) }
    }
}

impl Key<*mut extent_hooks_t, 3> {
    /// Sets the table of an arena, which is created if it does not exist.
    ///
    /// # Safety
    /// The table and its functions are correct for jemalloc, and stay as long as the process.
    pub(crate) unsafe fn write_in(
        &self,
        arena: u32,
        table: *mut extent_hooks_t,
    ) -> Result<(), HostError> {
        let numbers = self.numbers_with(1, arena)?;
        // SAFETY: the control takes such a pointer; the caller guarantees that the table is valid.
        unsafe { self.write_raw(&numbers, Some(table)) }
    }
}

impl Key<(), 3> {
    /// Triggers a control named `arena.0.*` in one arena. Refused if no arena is initialised at the
    /// index (EFAULT).
    ///
    /// # Safety
    /// If it frees memory that may be live (`arena.0.destroy`): nothing points into the arena, and
    /// no thread allocates in it any more.
    pub(crate) unsafe fn perform_in(&self, arena: u32) -> Result<(), HostError> {
        self.perform_by(&self.numbers_with(1, arena)?)
    }
}

impl<const N: usize> Key<(), N> {
    /// Has the control done.
    #[inline]
    pub(crate) fn perform(&self) -> Result<(), HostError> {
        self.perform_by(self.numbers()?)
    }

    fn perform_by(&self, numbers: &[usize; N]) -> Result<(), HostError> {
        // SAFETY: these controls take no value. Those that run without an index free no live
        // memory: purge and decay release unused pages, flush empties a cache. For the others the
        // caller of `perform_in` guarantees it.
        unsafe { self.write_raw(numbers, None::<()>) }
    }
}

/// Options that jemalloc 5.3.1 takes and has no control for (`conf.c` without `ctl.c`).
const WITHOUT_CONTROL: &[&str] = &[
    "bin_shards",
    "calloc_madvise_threshold",
    "hpa_hugification_threshold_ratio",
    "hpa_purge_threshold_ratio",
    "lg_tcache_max",
    "narenas_ratio",
    "prof_log",
    "prof_unbias",
    "san_guard_large",
    "san_guard_small",
    "tcache_ncached_max",
];

/// Returns `true` if jemalloc has a setting of this name at start. Names have letters, digits and
/// `_`.
pub(crate) fn knows_option(name: &str) -> bool {
    let mut numbers = [0; 2];
    let control = CString::new(format!("opt.{name}")).unwrap_or_default();
    WITHOUT_CONTROL.contains(&name) || numbers_of(&control, &mut numbers) == 0
}

/// The number of components of a control's name.
const fn components(name: &CStr) -> usize {
    let bytes = name.to_bytes();
    let (mut count, mut at) = (1, 0);
    while at < bytes.len() {
        if bytes[at] == b'.' {
            count += 1;
        }
        at += 1;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_once_and_read_as_the_manual_says() {
        assert!(CONFIG_STATS.read().unwrap());
        assert!(CONFIG_STATS.numbers.get().is_some());
        let page = ARENAS_PAGE.read().unwrap();
        assert!(page.is_power_of_two() && page >= 4096, "{page}");
        assert!(VERSION.read().unwrap().unwrap().starts_with("5."));
    }

    #[test]
    fn every_refresh_advances_the_epoch() {
        let first = EPOCH.exchange(1).unwrap();
        assert!(EPOCH.exchange(1).unwrap() > first);
    }

    #[test]
    fn what_is_refused_is_an_error_that_names_the_control() {
        let error = OPT_ARENAS.write(3).unwrap_err();
        assert!(matches!(error, HostError::Mallctl { name: "opt.narenas", act: "write", .. }));
        let unknown: Key<usize, 2> = Key::new(c"stats.nothing");
        let error = unknown.read().unwrap_err();
        assert!(matches!(error, HostError::Mallctl { name: "stats.nothing", act: "find", .. }));
        assert!(ARENA_DIRTY_DECAY.write_in(0, -2).is_err());
    }

    #[test]
    fn an_uninitialised_arena_has_no_decay_time() {
        assert!(ARENA_DIRTY_DECAY.read_in(0).is_ok(), "arena 0 always exists");
        assert!(ARENA_DIRTY_DECAY.read_in(ARENA_LIMIT - 1).is_err());
        for arena in [ARENA_LIMIT, 4096, u32::MAX] {
            let error = ARENA_DIRTY_DECAY.write_in(arena, 1000).unwrap_err();
            assert!(error.to_string().contains(&arena.to_string()), "{error}");
        }
    }

    #[test]
    fn options_are_known_by_their_controls_or_by_name() {
        for name in ["narenas", "dirty_decay_ms", "abort_conf", "prof", "bin_shards", "hpa"] {
            assert!(knows_option(name), "{name}");
        }
        for name in ["", "narena", "arenas", "background_threads", "malloc_conf_x"] {
            assert!(!knows_option(name), "{name}");
        }
    }

    #[test]
    fn components_are_counted() {
        assert_eq!(components(c"epoch"), 1);
        assert_eq!(components(c"stats.arenas.4096.pdirty"), 4);
    }
}
