//! Call stacks for jemalloc's heap profiler, by unwind rules that are found once.
//!
//! jemalloc calls the hook of this module for each sample, on the thread that allocates. Its
//! default unwinder interprets the unwind tables of every frame of every sample: some 20,000
//! instructions, most of the cost of a sample. Nearly all frames follow a simple rule: the return
//! address and the caller's frame pointer are stored at fixed distances above the stack pointer or
//! the frame pointer. Such a rule fits into one word together with its address. A table keeps the
//! rules, so a frame that was seen before costs some 20 instructions.
//!
//! If a frame has no such rule, jemalloc's own unwinder walks the stack: signal handlers, code
//! without unwind tables, stacks that the program switched to. So it does for the first sample of a
//! thread, which finds where its stack is.
//!
//! It relies on unwind tables (`.eh_frame_hdr`), which compilers for Linux on x86-64 write. On
//! other targets nothing is installed.
//!
//! It allocates only if a thread is sampled for the first time (`pthread_getattr_np` does).
//! jemalloc calls the hook between `pre_reentrancy` and `post_reentrancy`, so that allocation takes
//! no sample.
//!
//! Invariants: it reads only the stack of the calling thread, above the stack pointer; no lock is
//! held but the thread's own while its stack is found, and the loader's while a rule is looked up.
//! A rule is one atomic word, so threads cannot mix two. A forked child looks up no rules, since a
//! thread that it lacks may hold the loader's lock. When a library is unloaded, all rules are
//! dropped at the next lookup; a rule that is used until then can give a wrong stack, and nothing
//! else.
#![expect(unsafe_code, reason = "reads registers, the thread's stack and the tables of libraries")]

use std::arch::asm;
use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;
use std::slice;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use gimli::{
    BaseAddresses, CfaRule, EhFrame, EhFrameHdr, EndianSlice, LittleEndian, Register, RegisterRule,
    UnwindContext, UnwindContextStorage, UnwindSection, UnwindTableRow, X86_64,
};

use lowtide_core::fork::Birth;

use super::error::HostError;
use super::mallctl::{self as ctl, BacktraceHook};

/// jemalloc's own unwinder.
static OWN: OnceLock<(BacktraceHook, Birth)> = OnceLock::new();

/// The length of [`libc::pthread_getattr_np`] at most. In the first functions after it, too, the
/// stack of a thread is not asked for.
const GETATTR_MAX: u64 = 4096;

/// The number of rules that are kept, as a power of 2: 16 KiB. A service has some thousand return
/// addresses on the stacks that allocate.
const RULES_LOG: u32 = 11;

/// The rules, by the low bits of their return addresses. 0 is none.
static RULES: [AtomicU64; 1 << RULES_LOG] = [const { AtomicU64::new(0) }; 1 << RULES_LOG];

/// The libraries that had been unloaded when the rules were found.
static UNLOADED: AtomicU64 = AtomicU64::new(0);

/// Addresses of user space are below 2 to the power of this.
const ADDRESS_BITS: u32 = 47;
const TAG_BITS: u32 = ADDRESS_BITS - RULES_LOG;
/// The bits of an offset, in words.
const OFFSET_BITS: u32 = 12;
const OFFSET_MAX: u64 = (1 << OFFSET_BITS) - 1;
const WORD: u64 = 8;

/// Installs [`hook`] as the function by which jemalloc walks a stack.
pub(super) fn install() -> Result<(), HostError> {
    if OWN.get().is_none() {
        let _ = OWN.set((ctl::PROF_BACKTRACE.read()?, Birth::now()));
    }
    // SAFETY: the hook writes within the given room, or passes the arguments on.
    unsafe { ctl::PROF_BACKTRACE.write(hook) }
}

/// How a frame finds its caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// The frame ends `size` bytes above the stack pointer or the frame pointer. The return address
    /// is its last word. The caller's frame pointer is stored `frame_pointer` bytes below the end,
    /// or unchanged if that is 0.
    Frame { base: Base, size: u64, frame_pointer: u64 },
    /// The frame has no caller.
    End,
    /// Left to jemalloc's unwinder.
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Base {
    StackPointer,
    FramePointer,
}

impl Rule {
    /// Returns the rule in the low bits of a word; not 0.
    fn packed(self) -> u64 {
        let (kind, size, frame_pointer) = match self {
            Self::Frame { base, size, frame_pointer } => {
                (1 + base as u64, size / WORD, frame_pointer / WORD)
            }
            Self::End => (3, 0, 0),
            Self::Other => (3, 1, 0),
        };
        kind | size << 2 | frame_pointer << (2 + OFFSET_BITS)
    }

    fn unpacked(word: u64) -> Self {
        let size = word >> 2 & OFFSET_MAX;
        let frame_pointer = (word >> (2 + OFFSET_BITS) & OFFSET_MAX) * WORD;
        let frame = |base| Self::Frame { base, size: size * WORD, frame_pointer };
        match word & 3 {
            1 => frame(Base::StackPointer),
            2 => frame(Base::FramePointer),
            _ if size == 0 => Self::End,
            _ => Self::Other,
        }
    }

    /// Returns the rule for this address of code, and keeps it.
    fn of(address: u64) -> Self {
        if address >> ADDRESS_BITS != 0 {
            return Self::Other;
        }
        let slot = address & ((1 << RULES_LOG) - 1);
        let Some(place) = usize::try_from(slot).ok().and_then(|slot| RULES.get(slot)) else {
            return Self::Other;
        };
        let (tag, shift) = (address >> RULES_LOG, u64::BITS - TAG_BITS);
        let word = place.load(Ordering::Relaxed);
        if word != 0 && word >> shift == tag {
            return Self::unpacked(word);
        }
        let Some(rule) = look_up(address) else { return Self::Other };
        place.store(tag << shift | rule.packed(), Ordering::Relaxed);
        rule
    }
}

const _: () = assert!(2 + 2 * OFFSET_BITS + TAG_BITS <= u64::BITS, "a rule fits into a word");

/// The registers from which a caller is found.
#[derive(Clone, Copy, Debug)]
struct Registers {
    instruction: u64,
    stack: u64,
    frame: u64,
}

impl Registers {
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "they are those of the caller's frame")]
    fn of_this_frame() -> Self {
        let (instruction, stack, frame);
        // SAFETY: reads three registers.
        unsafe {
            asm!(
                "lea {instruction}, [rip]",
                "mov {stack}, rsp",
                "mov {frame}, rbp",
                instruction = out(reg) instruction,
                stack = out(reg) stack,
                frame = out(reg) frame,
                options(nomem, nostack, preserves_flags),
            );
        }
        Self { instruction, stack, frame }
    }
}

/// Stores the return addresses of the calling thread's stack, the innermost first, for jemalloc.
///
/// # Safety
/// `addresses` has room for `max` addresses, and `count` for their number.
unsafe extern "C" fn hook(addresses: *mut *mut c_void, count: *mut c_uint, max: c_uint) {
    let registers = Registers::of_this_frame();
    let mut taken: c_uint = 0;
    let (start, end) = STACK.get();
    if end == 0 {
        // SAFETY: the caller's arguments.
        unsafe { first_of_thread(addresses, count, max) };
        return;
    }
    let is_whole = walk(&(start..end), registers, |address| {
        if taken == max {
            return false;
        }
        // SAFETY: below `max`, for which the caller has room.
        let place = unsafe { addresses.add(taken as usize) };
        // SAFETY: the same.
        unsafe { place.write(address as *mut c_void) };
        taken += 1;
        true
    });
    if is_whole {
        // SAFETY: the caller's place for the number.
        unsafe { count.write(taken) };
    } else if let Some((own, _)) = OWN.get() {
        // SAFETY: jemalloc's own hook, with the caller's arguments.
        unsafe { own(addresses, count, max) };
    }
}

/// Has jemalloc's own unwinder store the addresses, and finds the stack of the thread for the next
/// sample.
///
/// The C library holds a lock of the thread while it finds the stack, and allocates. If malloc is
/// jemalloc's, that allocation may be this sample, in which it cannot be asked again.
///
/// # Safety
/// As for [`hook`].
#[cold]
unsafe fn first_of_thread(addresses: *mut *mut c_void, count: *mut c_uint, max: c_uint) {
    let Some((own, _)) = OWN.get() else { return };
    // SAFETY: jemalloc's own hook, with the caller's arguments.
    unsafe { own(addresses, count, max) };
    // SAFETY: the hook has set the number.
    let taken = unsafe { count.read() }.min(max);
    // SAFETY: the hook has stored so many addresses.
    let callers = unsafe { slice::from_raw_parts(addresses, taken as usize) };
    let start = libc::pthread_getattr_np as *const () as u64;
    let asks = start..start.saturating_add(GETATTR_MAX);
    if !callers.iter().any(|address| asks.contains(&(*address as u64))) {
        STACK.set(find_thread_stack().unwrap_or((1, 1)));
    }
}

/// Passes the return addresses to `take`, until it wants no more. Returns `false` if a frame has no
/// rule. `stack` is that of this thread.
#[inline]
fn walk(stack: &Range<u64>, mut registers: Registers, mut take: impl FnMut(u64) -> bool) -> bool {
    if !stack.contains(&registers.stack) {
        return false; // a stack that the program switched to
    }
    // Reads a word of the stack of this thread, above the frames that were left.
    let read = |at: u64, above: u64| {
        let is_inside = at >= above && at.is_multiple_of(WORD) && at + WORD <= stack.end;
        // SAFETY: aligned, and between the stack pointer and the end of the thread's stack, all of
        // which is mapped. Other threads may write to it; then the value is of no use, and no more.
        is_inside.then(|| unsafe { (at as *const u64).read_volatile() })
    };
    let mut address = registers.instruction;
    // Ends: each frame begins above the one before, within the stack.
    loop {
        let (base, size, frame_pointer) = match Rule::of(address) {
            Rule::End => return true,
            Rule::Other => return false,
            Rule::Frame { base, size, frame_pointer } => (base, size, frame_pointer),
        };
        let begin = match base {
            Base::StackPointer => registers.stack,
            Base::FramePointer => registers.frame,
        };
        let Some(end) = begin.checked_add(size).filter(|end| *end > registers.stack) else {
            return false;
        };
        let Some(returns_to) = read(end - WORD, registers.stack) else { return false };
        if frame_pointer != 0 {
            let Some(frame) = read(end.saturating_sub(frame_pointer), registers.stack) else {
                return false;
            };
            registers.frame = frame;
        }
        registers.stack = end;
        if returns_to == 0 || !take(returns_to) {
            return true;
        }
        // A return address may be the first of the next function, after a call that never returns.
        address = returns_to - 1;
    }
}

thread_local! {
    /// The addresses of this thread's stack; `(0, 0)` before they are looked for, `(1, 1)` if they
    /// cannot be known.
    static STACK: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// Asks the C library for the first address of this thread's stack and the one after the last.
fn find_thread_stack() -> Option<(u64, u64)> {
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    // SAFETY: has no preconditions.
    let thread = unsafe { libc::pthread_self() };
    // SAFETY: the calling thread, and a valid place, which the call fills unless it fails.
    let found = unsafe { libc::pthread_getattr_np(thread, attributes.as_mut_ptr()) };
    if found != 0 {
        return None;
    }
    let (mut start, mut size) = (ptr::null_mut(), 0);
    // SAFETY: the attributes were filled, and both results have valid places.
    let found =
        unsafe { libc::pthread_attr_getstack(attributes.as_ptr(), &raw mut start, &raw mut size) };
    // SAFETY: the attributes were filled, and are not used any more.
    unsafe { libc::pthread_attr_destroy(attributes.as_mut_ptr()) };
    let start = start as u64;
    (found == 0).then_some((start, start.checked_add(size as u64)?))
}

/// Looks up the rule for an address of code in the unwind tables of the loaded libraries. Returns
/// `None` in a forked child, in which a thread of the parent may hold the loader's lock.
#[cold]
fn look_up(address: u64) -> Option<Rule> {
    if OWN.get().is_some_and(|(_, birth)| !birth.is_here()) {
        return None;
    }
    let mut search = Search { address, rule: Rule::Other, unloaded: 0 };
    // SAFETY: the callback gets a pointer to `search`, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(search_library), (&raw mut search).cast()) };
    if UNLOADED.swap(search.unloaded, Ordering::Relaxed) != search.unloaded {
        RULES.iter().for_each(|rule| rule.store(0, Ordering::Relaxed));
    }
    Some(search.rule)
}

struct Search {
    address: u64,
    rule: Rule,
    /// The libraries unloaded since the start.
    unloaded: u64,
}

/// Looks at one library, and ends the search in the one that has the address.
///
/// # Safety
/// The loader's arguments, and a pointer to a [`Search`].
unsafe extern "C" fn search_library(
    library: *mut libc::dl_phdr_info,
    _size: usize,
    search: *mut c_void,
) -> c_int {
    // SAFETY: a pointer to a `Search` that nothing else uses.
    let search = unsafe { &mut *search.cast::<Search>() };
    // SAFETY: the loader's description of a library, valid during the call.
    let library = unsafe { &*library };
    search.unloaded = library.dlpi_subs;
    if library.dlpi_phdr.is_null() {
        return 0;
    }
    // SAFETY: the loader gives the number of headers.
    let headers = unsafe { slice::from_raw_parts(library.dlpi_phdr, library.dlpi_phnum.into()) };
    let range = |header: &libc::Elf64_Phdr| {
        let start = library.dlpi_addr.wrapping_add(header.p_vaddr);
        start..start.saturating_add(header.p_memsz)
    };
    let loaded = || headers.iter().filter(|header| header.p_type == libc::PT_LOAD).map(range);
    if !loaded().any(|segment| segment.contains(&search.address)) {
        return 0;
    }
    let table = headers.iter().find(|header| header.p_type == libc::PT_GNU_EH_FRAME).map(range);
    if let Some(table) = table
        && let Some(segment) = loaded().find(|segment| segment.contains(&table.start))
    {
        search.rule = rule_in(&table, &segment, search.address).unwrap_or(Rule::Other);
    }
    1
}

/// Evaluates the unwind table at an address of a library; `None` if it says nothing of it.
fn rule_in(table: &Range<u64>, segment: &Range<u64>, address: u64) -> Option<Rule> {
    // To the end of the segment: the length of the frames' section is unknown.
    let bytes = |start: u64| {
        let length = usize::try_from(segment.end.checked_sub(start)?).ok()?;
        // SAFETY: a part of a segment that the loader has mapped, which stays while it holds its
        // lock for this call. It is read-only.
        let bytes = unsafe { slice::from_raw_parts(start as *const u8, length) };
        segment.contains(&start).then(|| EndianSlice::new(bytes, LittleEndian))
    };
    let bases = BaseAddresses::default().set_eh_frame_hdr(table.start);
    let header = EhFrameHdr::from(bytes(table.start)?).parse(&bases, 8).ok()?;
    let gimli::Pointer::Direct(frames) = header.eh_frame_ptr() else { return None };
    let bases = bases.set_eh_frame(frames);
    let frames = EhFrame::from(bytes(frames)?);
    let mut context = UnwindContext::<usize, OnStack>::new_in();
    let row = header
        .table()?
        .unwind_info_for_address(&frames, &bases, &mut context, address, EhFrame::cie_from_offset)
        .ok()?;
    Some(rule_of(row))
}

fn rule_of(row: &UnwindTableRow<usize, OnStack>) -> Rule {
    let returns_at = row.register(X86_64::RA);
    if returns_at == Some(RegisterRule::Undefined) {
        return Rule::End;
    }
    let CfaRule::RegisterAndOffset { register, offset } = *row.cfa() else { return Rule::Other };
    let base = match register {
        X86_64::RSP => Base::StackPointer,
        X86_64::RBP => Base::FramePointer,
        _ => return Rule::Other,
    };
    let words = |offset: i64| {
        let bytes = u64::try_from(offset).ok()?;
        (bytes.is_multiple_of(WORD) && bytes / WORD <= OFFSET_MAX).then_some(bytes)
    };
    let frame_pointer = match row.register(X86_64::RBP) {
        None | Some(RegisterRule::SameValue) => Some(0),
        Some(RegisterRule::Offset(offset)) => words(-offset).filter(|below| *below > 0),
        _ => None,
    };
    match (words(offset), frame_pointer, returns_at) {
        (Some(size @ WORD..), Some(frame_pointer), Some(RegisterRule::Offset(-8))) => {
            Rule::Frame { base, size, frame_pointer }
        }
        _ => Rule::Other,
    }
}

/// The memory for evaluating a table, which is not allocated. x86-64 has 17 registers with rules.
struct OnStack;

impl UnwindContextStorage<usize> for OnStack {
    type Rules = [(Register, RegisterRule<usize>); 16];
    type Stack = [UnwindTableRow<usize, Self>; 3];
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;
    use std::thread;

    use super::*;

    #[link(name = "gcc_s")]
    unsafe extern "C" {
        fn _Unwind_Backtrace(
            callback: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
            addresses: *mut c_void,
        ) -> c_int;
        fn _Unwind_GetIP(context: *mut c_void) -> u64;
    }

    extern "C" fn take(context: *mut c_void, addresses: *mut c_void) -> c_int {
        // SAFETY: the context of the callback.
        let address = unsafe { _Unwind_GetIP(context) };
        // SAFETY: the vector that was given for it.
        unsafe { &mut *addresses.cast::<Vec<u64>>() }.push(address);
        0
    }

    /// Returns the return addresses of its callers by the C library's unwinder.
    #[inline(never)]
    fn by_tables() -> Vec<u64> {
        let mut addresses = Vec::<u64>::new();
        // SAFETY: the callback takes a vector.
        unsafe { _Unwind_Backtrace(take, (&raw mut addresses).cast()) };
        addresses.retain(|address| *address != 0);
        addresses
    }

    fn thread_stack() -> Range<u64> {
        let (start, end) = find_thread_stack().unwrap_or((1, 1));
        STACK.set((start, end));
        start..end
    }

    /// Returns the same by rules; `None` if a frame has none.
    #[inline(never)]
    fn by_rules() -> Option<Vec<u64>> {
        let mut addresses = Vec::new();
        let registers = Registers::of_this_frame();
        let is_whole = walk(&thread_stack(), registers, |address| {
            addresses.push(address);
            true
        });
        is_whole.then_some(addresses)
    }

    /// Checks that both find the same callers. The frames of this function and those below differ.
    #[inline(never)]
    fn compare() -> usize {
        for _ in 0..2 {
            let rules = by_rules().expect("all frames have rules");
            let tables = by_tables();
            assert!(rules.len() > 5 && tables.len() > 5, "{rules:x?} {tables:x?}");
            let same = rules.iter().rev().zip(tables.iter().rev());
            let same = same.take_while(|(one, other)| one == other).count();
            assert_eq!(same, rules.len() - 1, "{rules:x?} {tables:x?}");
        }
        by_tables().len()
    }

    #[inline(never)]
    fn deeper(levels: usize, block: &[u64; 40]) -> usize {
        let mut own = *black_box(block);
        own[levels % 40] = 1;
        let found = if levels == 0 { compare() } else { deeper(levels - 1, &own) };
        black_box(own[0]);
        found
    }

    extern "C" fn in_c(one: *const c_void, other: *const c_void) -> c_int {
        compare();
        // SAFETY: an element of the array that is sorted.
        let one = unsafe { *one.cast::<u8>() };
        // SAFETY: the same.
        let other = unsafe { *other.cast::<u8>() };
        one.cmp(&other) as c_int
    }

    #[test]
    fn rules_find_the_callers_that_the_tables_find() {
        let shallow = compare();
        assert!(deeper(30, &[0; 40]) > shallow + 20);
        let threads: Vec<_> =
            (0..4).map(|nth| thread::spawn(move || deeper(nth, &[0; 40]))).collect();
        for thread in threads {
            thread.join().expect("no panic");
        }
    }

    #[test]
    fn frames_of_c_have_rules() {
        let mut numbers = [3_u8, 1, 2];
        // SAFETY: three elements of one byte, and a function that compares two.
        unsafe { libc::qsort(numbers.as_mut_ptr().cast(), 3, 1, Some(in_c)) };
        assert_eq!(numbers, [1, 2, 3]);
    }

    /// A frame of 64 KiB is too large for a rule.
    #[test]
    fn a_frame_without_a_rule_is_left_to_the_tables() {
        #[inline(never)]
        fn large() -> Option<Vec<u64>> {
            let block = black_box([0_u8; 64 << 10]);
            let found = by_rules();
            black_box(block[1]);
            found
        }
        assert_eq!(large(), None);
        assert!(by_rules().is_some());
    }

    #[test]
    fn a_stack_that_is_not_the_threads_is_left_to_the_tables() {
        let own = thread_stack();
        let mut elsewhere = vec![0_u64; 512];
        let stack = elsewhere.as_mut_ptr() as u64 + 1024;
        let mut registers = Registers::of_this_frame();
        registers.stack = stack;
        assert!(!walk(&own, registers, |_| true));
        let registers = Registers { frame: u64::MAX, ..Registers::of_this_frame() };
        walk(&own, registers, |_| true); // whatever it finds, it reads nothing outside
        let registers = Registers { instruction: 1, ..Registers::of_this_frame() };
        assert!(!walk(&own, registers, |_| true), "no library has this address");
    }

    #[test]
    fn a_rule_survives_its_word() {
        for base in [Base::StackPointer, Base::FramePointer] {
            for size in [8, 16, OFFSET_MAX * WORD] {
                for frame_pointer in [0, 16, OFFSET_MAX * WORD] {
                    let rule = Rule::Frame { base, size, frame_pointer };
                    let tag = u64::MAX << (u64::BITS - TAG_BITS);
                    assert_eq!(Rule::unpacked(tag | rule.packed()), rule);
                }
            }
        }
        assert_eq!(Rule::unpacked(Rule::End.packed()), Rule::End);
        assert_eq!(Rule::unpacked(Rule::Other.packed()), Rule::Other);
    }
}
