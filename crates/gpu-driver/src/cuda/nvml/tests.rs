//! The lists of processes as drivers write them, and libraries that are not NVML.

use super::*;

/// A list as a driver writes it, with entries of so many words.
fn written(words: usize, processes: &[(u32, u64)]) -> Vec<u64> {
    let mut room = vec![UNTOUCHED; 128 * ENTRY_MAX];
    for (entry, (pid, used)) in room.chunks_exact_mut(words).zip(processes) {
        entry.fill(u64::MAX); // instances: none
        (entry[0], entry[1]) = (u64::from(*pid), *used);
    }
    room
}

#[test]
#[cfg(target_endian = "little")]
fn entries_of_each_size_that_drivers_write_are_read() {
    let processes = [(7, 1 << 30), (9, u64::MAX), (4_000_000, 5)];
    let expected = [(7, Some(ByteSize::gib(1))), (9, None), (4_000_000, Some(ByteSize::new(5)))];
    for words in [2, 3, 4] {
        for count in 1..=3 {
            let found = parsed(&written(words, &processes[..count]), count);
            assert_eq!(found, expected[..count], "{words} words");
        }
    }
}

#[test]
fn a_list_that_was_cleared_or_not_written_at_all_is_read_as_the_usual_kind() {
    let mut room = vec![0; 128 * ENTRY_MAX];
    room[..3].copy_from_slice(&[7, 8, 9]);
    assert_eq!(words_of_entry(&room, 1), 3);
    assert_eq!(parsed(&room, 2).len(), 1, "an entry without a process");
    assert_eq!(parsed(&[UNTOUCHED; 5], 0), []);
}

#[test]
fn a_library_that_is_absent_or_another_one_is_an_error_that_names_it() {
    let absent = Nvml::open_named("liblowtide-absent.so.1", &|_| true).expect_err("absent");
    let DriverError::NoNvml { library, .. } = &absent else { panic!("{absent}") };
    assert_eq!(*library, "liblowtide-absent.so.1");
    let text = absent.to_string();
    assert!(text.starts_with("cannot load NVML: ") && text.contains("utility"), "{text}");
}

#[test]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn a_library_without_the_functions_is_an_error_that_names_the_first() {
    let error = Nvml::open_named("libm.so.6", &|_| true).expect_err("another library");
    assert_eq!(error, DriverError::NoFunction { function: "nvmlInit_v2" });
}

#[test]
fn a_name_is_short_and_has_no_control_characters() {
    assert_eq!(printable("a\nb\u{1b}[31m"), "a?b?[31m");
    let long = "ä".repeat(NAME_MAX);
    assert_eq!(printable(&long), "ä".repeat(NAME_MAX / 2));
    assert_eq!(printable(&"x".repeat(65)).len(), NAME_MAX);
    assert!(comm(u32::MAX).is_none());
}

#[test]
fn of_two_lists_with_the_same_process_the_larger_figure_counts() {
    let mut all = BTreeMap::new();
    for used in [Some(ByteSize::mib(2)), None, Some(ByteSize::mib(1))] {
        add(&mut all, 7, used);
    }
    add(&mut all, 8, None);
    assert_eq!(all.into_iter().collect::<Vec<_>>(), [(7, Some(ByteSize::mib(2))), (8, None)]);
}

#[test]
fn a_result_comes_with_what_an_operator_can_do() {
    for (code, part) in [(3, "vGPU"), (4, "expected a user"), (9, "module"), (18, "reboot")] {
        assert!(advice(code).starts_with(": ") && advice(code).contains(part), "{code}");
    }
    assert_eq!(advice(999), "");
}
