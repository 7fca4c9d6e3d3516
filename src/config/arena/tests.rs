//! Claims about options of arenas: spellings, bounds, scopes, precedence, conflicts, the mapping.

use super::keys::Dialect;
use super::options::Written;
use super::resolve::{DEVICE_FULL, DEVICE_LIMIT, REPLACED};
use super::*;
use crate::bytes::ByteSize;
use crate::config::{ConfigError, Fault};
use crate::device::driver::{Backend, DriverError};
use crate::device::{ArenaConfig, Growth, HostDriver};

const MIB: u64 = 1 << 20;

fn keys(entries: &[(&str, &str)]) -> ArenaOptions {
    ArenaOptions::from_keys(entries.iter().copied()).expect("valid")
}

/// The faults of bare keys.
fn faults(entries: &[(&str, &str)]) -> Vec<Fault> {
    ArenaOptions::from_keys(entries.iter().copied()).expect_err("faults").faults
}

/// Returns a value as ONNX Runtime writes it.
fn text(value: u64) -> String {
    if value == u64::MAX { "0".to_owned() } else { value.to_string() }
}

#[test]
fn the_nine_keys_have_onnx_runtimes_names_and_defaults() {
    let expected = [
        ("arena.extend_strategy", "0"),
        ("arena.initial_chunk_size_bytes", "1048576"),
        ("arena.max_dead_bytes_per_chunk", "134217728"),
        ("arena.initial_growth_chunk_size_bytes", "2097152"),
        ("arena.max_power_of_two_extend_bytes", "1073741824"),
        ("arena.max_mem", "0"),
        ("arena.use_cuda_mempool", "0"),
        ("arena.cuda_mempool_release_threshold", "0"),
        ("arena.cuda_mempool_bytes_to_keep_on_shrink", "0"),
    ];
    let found = ArenaKey::ALL.map(|key| (key.name(), text(key.default_value())));
    assert_eq!(found, expected.map(|(name, default)| (name, default.to_owned())));
    let read = keys(&found.each_ref().map(|(name, text)| (*name, text.as_str())));
    for key in ArenaKey::ALL {
        assert_eq!(read.get(key), Some(key.default_value()), "{key}");
    }
}

#[test]
fn each_bound_is_the_last_value_that_is_taken() {
    let int = ["1", "2147483647"];
    let size = ["0", "18446744073709551615"];
    for (key, taken, refused) in [
        ("arena.extend_strategy", ["0", "1"], ["2", "-1"]),
        ("arena.initial_chunk_size_bytes", int, ["0", "2147483648"]),
        ("arena.max_dead_bytes_per_chunk", int, ["0", "2147483648"]),
        ("arena.initial_growth_chunk_size_bytes", int, ["-1", "2147483648"]),
        (
            "arena.max_power_of_two_extend_bytes",
            ["1", "9223372036854775807"],
            ["0", "9223372036854775808"],
        ),
        ("arena.max_mem", size, ["-1", "18446744073709551616"]),
        ("arena.use_cuda_mempool", ["0", "1"], ["2", "true"]),
        ("arena.cuda_mempool_release_threshold", size, ["-1", "18446744073709551616"]),
        ("arena.cuda_mempool_bytes_to_keep_on_shrink", size, ["-5", "1e6"]),
    ] {
        for value in taken {
            assert_eq!(keys(&[(key, value)]).iter().count(), 1, "{key}={value}");
        }
        // What `stoi` would read in part is refused as a whole.
        for value in refused.into_iter().chain(["", " 1", "+1", "1 ", "12abc", "1MiB", "\u{661}"]) {
            let [Fault { name: found, value: given, .. }] = &faults(&[(key, value)])[..] else {
                panic!("{key}={value}: one bad value");
            };
            assert_eq!((found.as_str(), given.as_deref()), (key, Some(value)));
        }
    }
}

#[test]
fn an_unknown_key_is_an_error_that_names_the_known_ones() {
    for key in ["arena.max_memory", "max_mem", "arena.", "", "Arena.max_mem", "gpu_mem_limit"] {
        let [Fault { name: found, value: None, problem: known }] = &faults(&[(key, "1")])[..]
        else {
            panic!("{key}: one unknown key");
        };
        assert_eq!(found, key);
        assert!(ArenaKey::ALL.into_iter().all(|key| known.contains(key.name())), "{known}");
    }
}

#[test]
fn all_faults_are_told_at_once() {
    let found = faults(&[
        ("arena.max_mem", "much"),
        ("arena.nothing", "1"),
        ("arena.use_cuda_mempool", "0"),
        ("arena.extend_strategy", "kSameAsRequested"),
    ]);
    assert_eq!(found.len(), 3, "{found:?}");
}

#[test]
fn two_spellings_of_one_key_agree_or_are_an_error() {
    let same = ArenaOptions::from_keys([("arena.max_mem", "7"), ("arena.max_mem", "7")]);
    assert_eq!(same.expect("they agree").iter().count(), 1);
    let scoped = [("ep.x.arena.max_mem", "7"), ("ep.x.arena.max_mem", "8")];
    let error = ArenaOptions::of_session("X", scoped).expect_err("they do not");
    assert_eq!(
        error.to_string(),
        "ep.x.arena.max_mem=\"8\": expected 7B, as ep.x.arena.max_mem says"
    );
}

#[test]
fn a_limit_of_zero_is_none_in_each_of_onnx_runtimes_spellings() {
    let none = Some(u64::MAX);
    let limit = |options: ArenaOptions| options.get(ArenaKey::Limit);
    assert_eq!(limit(keys(&[("arena.max_mem", "0")])), none);
    assert_eq!(limit(ArenaOptions::from_arena_cfg([("max_mem", "0")]).expect("valid")), none);
    let provider = ArenaOptions::from_provider_options([("gpu_mem_limit", "0")]);
    assert_eq!(limit(provider.expect("valid")), none);
}

#[test]
fn the_names_of_the_c_interface_are_taken_and_minus_one_is_the_default_there() {
    let options = ArenaOptions::from_arena_cfg([
        ("max_mem", "4096"),
        ("arena_extend_strategy", "1"),
        ("initial_chunk_size_bytes", "-1"),
        ("max_dead_bytes_per_chunk", "-1"),
        ("initial_growth_chunk_size_bytes", "512"),
        ("max_power_of_two_extend_bytes", "-1"),
    ])
    .expect("valid");
    let said: Vec<_> = options.iter().map(|(key, written)| (key, written.value)).collect();
    let same = 1;
    let (strategy, regrowth, limit) =
        (ArenaKey::ExtendStrategy, ArenaKey::RegrowthBytes, ArenaKey::Limit);
    assert_eq!(said, [(strategy, same), (regrowth, 512), (limit, 4096)]);
    // It knows no keys of CUDA's pool, and no key with a prefix.
    for key in ["use_cuda_mempool", "arena.max_mem", "gpu_mem_limit"] {
        let error = ArenaOptions::from_arena_cfg([(key, "1")]).expect_err("unknown");
        assert!(matches!(&error.faults[..], [Fault { value: None, .. }]), "{error}");
    }
    assert!(ArenaOptions::from_arena_cfg([("max_mem", "-1")]).is_err(), "it is a size_t");
}

#[test]
fn the_providers_options_are_picked_out_of_its_others() {
    let options = ArenaOptions::from_provider_options([
        ("device_id", "0"),
        ("gpu_mem_limit", "2147483648"),
        ("arena_extend_strategy", "kSameAsRequested"),
        ("cudnn_conv_algo_search", "EXHAUSTIVE"),
    ])
    .expect("valid");
    assert_eq!(options.iter().count(), 2);
    let wrong = ArenaOptions::from_provider_options([("arena_extend_strategy", "kDoubling")]);
    let text = wrong.expect_err("no strategy").to_string();
    assert!(text.contains("kNextPowerOfTwo") && text.contains("kSameAsRequested"), "{text}");
}

#[test]
fn a_factory_is_named_verbatim_and_a_provider_in_lower_case() {
    let name = "CUDAExecutionProvider";
    let process = [
        ("ep_factory.CUDAExecutionProvider.arena.max_mem", "1"),
        ("ep_factory.Other.arena.max_mem", "2"),
        ("ep_factory.CUDAExecutionProvider.device_id", "0"),
    ];
    let options = ArenaOptions::of_process(name, process).expect("valid");
    let written = options.written(ArenaKey::Limit).expect("read");
    assert_eq!((written.value, written.spelled.as_str()), (1, process[0].0));
    let session = [
        ("ep.cudaexecutionprovider.arena.max_mem", "3"),
        ("ep.other.arena.max_mem", "x"),
        ("session.intra_op_num_threads", "4"),
    ];
    let options = ArenaOptions::of_session(name, session).expect("valid");
    assert_eq!(options.get(ArenaKey::Limit), Some(3));
    assert!(ArenaOptions::of_session(name, [("a", "b")]).expect("none").is_empty());
}

#[test]
fn a_key_that_onnx_runtime_passes_over_in_silence_is_an_error() {
    let name = "CudaEp";
    let process = |key: &str| ArenaOptions::of_process(name, [(key, "1")]);
    let session = |key: &str| ArenaOptions::of_session(name, [(key, "1")]);
    let factory = "ep_factory.CudaEp.arena.max_mem";
    let provider = "ep.cudaep.arena.max_mem";
    for (found, expected) in [
        (process("ep_factory.cudaep.arena.max_mem"), factory),
        (process("EP_FACTORY.CudaEp.arena.max_mem"), factory),
        (process(provider), factory),
        (process("arena.max_mem"), factory),
        (process("ep_factory.CudaEp.arena.max_memory"), "one of arena.extend_strategy, "),
        (session("ep.CudaEp.arena.max_mem"), provider),
        (session("ep.cudaep.Arena.max_mem"), provider),
        (session(factory), provider),
        (session("arena.max_mem"), provider),
        (session("ep.cudaep.arena."), "one of arena.extend_strategy, "),
        (session(SHRINK_OPTION), "it in RunOptions"),
    ] {
        let error = found.expect_err("a fault");
        let [Fault { value: None, problem, .. }] = &error.faults[..] else { panic!("{error}") };
        assert!(problem.contains(&format!(": expected {expected}")), "{error}");
    }
    let error = session("ep_factory.CudaEp.arena.max_mem").expect_err("a fault");
    assert!(error.to_string().ends_with("expected ep.cudaep.arena.max_mem"), "{error}");
}

/// Layers of bare keys.
fn layers(layers: [Option<&[(&str, &str)]>; 3]) -> Layers {
    let [session, shared, replacement] = layers.map(|entries| entries.map(keys));
    Layers { session, shared, replacement, ..Layers::default() }
}

fn limit_in(layers: &Layers) -> (u64, ArenaSource) {
    let resolution = layers.resolve().expect("resolved");
    let limit = resolution.get(ArenaKey::Limit);
    (limit.value, limit.source)
}

#[test]
fn replacement_wins_then_shared_then_session_then_the_default() {
    use ArenaSource::{Default, Replacement, Session, Shared};
    let limit = |text| Some([("arena.max_mem", text)]);
    let (session, shared, replacement) = (limit("1"), limit("2"), limit("3"));
    let (session, shared) = (session.as_ref().map(|e| &e[..]), shared.as_ref().map(|e| &e[..]));
    let replacement = replacement.as_ref().map(|e| &e[..]);
    let empty = Some(&[][..]);
    let no_limit = u64::MAX;
    for (case, expected) in [
        ([None, None, None], (no_limit, Default)),
        ([session, None, None], (1, Session)),
        ([session, shared, None], (2, Shared)),
        ([session, empty, None], (no_limit, Default)),
        ([session, shared, replacement], (3, Replacement)),
        ([session, shared, empty], (2, Shared)),
        ([session, None, empty], (1, Session)),
        ([session, None, replacement], (3, Replacement)),
    ] {
        assert_eq!(limit_in(&layers(case)), expected, "{case:?}");
    }
}

#[test]
fn a_session_beside_a_shared_arena_counts_in_no_key_and_each_is_reported() {
    let session: &[_] =
        &[("arena.max_mem", "1"), ("arena.extend_strategy", "1"), ("arena.use_cuda_mempool", "0")];
    let shared: &[_] = &[("arena.max_mem", "2")];
    let resolution = layers([Some(session), Some(shared), None]).resolve().expect("resolved");
    let strategy = resolution.get(ArenaKey::ExtendStrategy);
    assert_eq!(strategy.source, ArenaSource::Default, "it does not mix with the shared options");
    let found: Vec<_> = resolution.conflicts.iter().map(|one| (one.key, one.reason)).collect();
    // The third agrees with what is in force: no conflict.
    let (strategy, limit) = (ArenaKey::ExtendStrategy, ArenaKey::Limit);
    assert_eq!(found, [(strategy, SHARED_ARENA), (limit, SHARED_ARENA)]);
    let [_, one] = &resolution.conflicts[..] else { panic!("two") };
    assert_eq!((one.wanted, one.wanted_by), (1, ArenaSource::Session));
    assert_eq!((one.effective.value, one.effective.source), (2, ArenaSource::Shared));
    assert_eq!(
        one.to_string(),
        "arena.max_mem=1B (session) is ignored because there is a shared arena: \
         arena.max_mem=2B (shared) is in force"
    );
}

#[test]
fn a_replacement_says_which_values_it_overrules() {
    let shared: &[_] = &[("arena.max_mem", "2"), ("arena.initial_chunk_size_bytes", "9")];
    let resolution =
        layers([None, Some(shared), Some(&[("arena.max_mem", "3")])]).resolve().expect("resolved");
    let [conflict] = &resolution.conflicts[..] else { panic!("{:?}", resolution.conflicts) };
    assert_eq!((conflict.wanted_by, conflict.reason), (ArenaSource::Shared, REPLACED));
    let initial = resolution.get(ArenaKey::InitialBytes);
    assert_eq!((initial.value, initial.source), (9, ArenaSource::Shared), "untouched");
}

#[test]
fn the_device_limit_bounds_the_arenas_and_says_so_only_where_somebody_wanted_more() {
    let limited = |entries| Layers {
        device_limit: Some(ByteSize::mib(4)),
        ..layers([Some(entries), None, None])
    };
    for (entries, value, source, conflicts) in [
        (&[][..], 4 * MIB, ArenaSource::DeviceLimit, 0),
        (&[("arena.max_mem", "0")][..], 4 * MIB, ArenaSource::DeviceLimit, 1),
        (&[("arena.max_mem", "8388608")][..], 4 * MIB, ArenaSource::DeviceLimit, 1),
        (&[("arena.max_mem", "4194304")][..], 4 * MIB, ArenaSource::Session, 0),
        (&[("arena.max_mem", "1048576")][..], MIB, ArenaSource::Session, 0),
    ] {
        let layers = limited(entries);
        assert_eq!(limit_in(&layers), ((value), source), "{entries:?}");
        let resolution = layers.resolve().expect("resolved");
        let reasons: Vec<_> = resolution.conflicts.iter().map(|one| one.reason).collect();
        assert_eq!(reasons, vec![DEVICE_LIMIT; conflicts], "{entries:?}");
    }
}

#[test]
fn cudas_pool_is_refused_in_every_layer_also_where_another_overrules_it() {
    let pool: Option<&[_]> = Some(&[("arena.use_cuda_mempool", "1")]);
    let none: Option<&[_]> = Some(&[("arena.use_cuda_mempool", "0")]);
    for case in [[pool, None, None], [pool, none, None], [None, pool, none], [None, None, pool]] {
        let error = layers(case).resolve().expect_err("not to be had");
        let [Fault { name, value, .. }] = &error.faults[..] else { panic!("{error}") };
        assert_eq!((&**name, value.as_deref()), ("arena.use_cuda_mempool", Some("1")));
    }
}

#[test]
fn a_value_that_does_nothing_says_why_and_only_where_somebody_wrote_it() {
    let without = |entries: &[(&str, &str)]| -> Vec<ArenaKey> {
        let resolution = layers([Some(entries), None, None]).resolve().expect("resolved");
        let idle = resolution.values.iter().filter(|value| value.without_effect.is_some());
        idle.map(|value| value.key).collect()
    };
    assert_eq!(without(&[]), []);
    let steps = [
        ("arena.extend_strategy", "1"),
        ("arena.initial_chunk_size_bytes", "1"),
        ("arena.max_power_of_two_extend_bytes", "1"),
    ];
    assert_eq!(without(&steps), [ArenaKey::InitialBytes, ArenaKey::StepMaxBytes]);
    assert_eq!(without(&steps[1..]), []);
    let kept = "arena.cuda_mempool_bytes_to_keep_on_shrink";
    assert_eq!(
        without(&[("arena.max_dead_bytes_per_chunk", "256"), (kept, "5")]),
        [ArenaKey::DeadBytes, ArenaKey::PoolKeep]
    );
}

#[test]
fn options_map_onto_the_arenas_limit_and_growth() {
    let base = ArenaConfig { reserve: ByteSize::gib(1), ..ArenaConfig::new("embedder") };
    let resolved = |entries: &[(&str, &str)]| {
        layers([Some(entries), None, None]).resolve().expect("resolved").config(base.clone())
    };
    let growth = Growth::NextPowerOfTwo {
        initial: ByteSize::mib(1),
        after_shrink: ByteSize::mib(2),
        cap: ByteSize::gib(1),
    };
    assert_eq!(resolved(&[]), ArenaConfig { growth, ..base.clone() }, "the defaults");
    let asked = resolved(&[
        ("arena.extend_strategy", "0"),
        ("arena.initial_chunk_size_bytes", "3"),
        ("arena.initial_growth_chunk_size_bytes", "4"),
        // The stream-aware arena of ONNX Runtime drops this key.
        ("arena.max_power_of_two_extend_bytes", "5"),
        ("arena.max_mem", "6"),
    ]);
    let [initial, after_shrink, cap, limit] = [3, 4, 5, 6].map(ByteSize::new);
    let growth = Growth::NextPowerOfTwo { initial, after_shrink, cap };
    assert_eq!(asked, ArenaConfig { growth, limit, ..base.clone() });
    assert_eq!(resolved(&[("arena.extend_strategy", "1")]).growth, Growth::SameAsRequested);
}

#[test]
fn cuarenas_zero_is_all_that_is_left_less_its_margin() {
    let within = |limit, left: Result<Option<u64>, DriverError>| {
        let headroom = left.map(|left| left.map(ByteSize::mib));
        let found =
            ArenaOptions::within(ByteSize::mib(limit), headroom, Backend::CudaVirtualMemory);
        found.map(|options| options.written(ArenaKey::Limit).cloned().expect("a limit"))
    };
    let failed = || DriverError::Refused { call: "x", code: 1, message: "y".to_owned() };
    let value = |mib| ByteSize::mib(mib).get();
    let all = within(0, Ok(Some(1024))).expect("known");
    assert_eq!((all.value, all.capped_from), (value(768), None));
    let less = within(100, Ok(Some(1024))).expect("known");
    assert_eq!((less.value, less.capped_from), (value(100), None));
    let more = within(1000, Ok(Some(1024))).expect("lowered");
    assert_eq!((more.value, more.capped_from), (value(768), Some(ByteSize::mib(1000))));
    let error = |found: Result<Written, ConfigError>| found.expect_err("refused").to_string();
    let unknown = "cuArena limit=\"0B\": expected an amount, because the ";
    assert!(error(within(0, Ok(None))).starts_with(unknown));
    let failed = error(within(0, Err(failed())));
    assert!(failed.starts_with(unknown) && failed.contains("report free memory: "), "{failed}");
    let margin = error(within(1, Ok(Some(256))));
    assert!(margin.ends_with("256.0 MiB that stay free, not 256.0 MiB"), "{margin}");
    assert_eq!(within(100, Ok(None)).expect("an amount").value, value(100));
    let host = ArenaOptions::from_cuarena_limit(ByteSize::ZERO, &HostDriver::new());
    let text = host.expect_err("the host's budget rules").to_string();
    assert!(text.contains("host driver cannot report"), "{text}");
}

#[test]
fn what_the_device_could_not_give_is_a_conflict() {
    let asked = ArenaOptions::within(ByteSize::gib(8), Ok(Some(ByteSize::gib(4))), Backend::Host);
    let layers = Layers { shared: Some(asked.expect("lowered")), ..Layers::default() };
    let resolution = layers.resolve().expect("resolved");
    let [conflict] = &resolution.conflicts[..] else { panic!("{:?}", resolution.conflicts) };
    assert_eq!(conflict.reason, DEVICE_FULL);
    assert_eq!(conflict.wanted, ByteSize::gib(8).get());
    assert_eq!(resolution.limit(), ByteSize::mib(4096 - 256));
    // Where a replacement overrules it, that is the one conflict.
    let replacement = Some(keys(&[("arena.max_mem", "7")]));
    let resolution = Layers { replacement, ..layers }.resolve().expect("resolved");
    let [conflict] = &resolution.conflicts[..] else { panic!("{:?}", resolution.conflicts) };
    assert_eq!(conflict.reason, REPLACED);
}

#[test]
fn a_later_replacement_adds_to_an_earlier_one() {
    let (first, then) =
        (keys(&[("arena.max_mem", "1"), ("arena.extend_strategy", "1")]), [("arena.max_mem", "2")]);
    let both = keys(&then).over(&first);
    assert_eq!(both.get(ArenaKey::Limit), Some(2));
    assert!(both.get(ArenaKey::ExtendStrategy).is_some());
}

#[test]
fn every_layer_is_in_force_or_in_one_conflict() {
    // Each layer says nothing, 1, 2 or 3 of each of two keys: all 4096 cases.
    let texts = [None, Some("1"), Some("2"), Some("3")];
    let names = ["arena.max_mem", "arena.initial_chunk_size_bytes"];
    let layer = |bits: usize| -> Option<ArenaOptions> {
        let said = names.into_iter().zip([texts[bits & 3], texts[bits >> 2 & 3]]);
        let said: Vec<_> = said.filter_map(|(name, text)| Some((name, text?))).collect();
        (bits != 0).then(|| keys(&said))
    };
    for case in 0..4096_usize {
        let [session, shared, replacement] = [case, case >> 4, case >> 8].map(|b| layer(b & 15));
        let device_limit = (case % 3 == 0).then_some(ByteSize::new(2));
        let layers = Layers { session, shared, replacement, device_limit, pinned: false };
        let resolution = layers.resolve().expect("resolved");
        for (options, source) in [
            (&layers.session, ArenaSource::Session),
            (&layers.shared, ArenaSource::Shared),
            (&layers.replacement, ArenaSource::Replacement),
        ] {
            for (key, written) in options.iter().flat_map(|options| options.iter()) {
                let effective = resolution.get(key);
                let said = |one: &&Conflict| one.key == key && one.wanted_by == source;
                let conflicts = resolution.conflicts.iter().filter(said).count();
                let agrees = effective.value == written.value;
                assert_eq!(conflicts, usize::from(!agrees), "{layers:?}: {resolution:?}");
            }
        }
    }
}

#[test]
fn a_selector_is_read_strictly() {
    let parse = |text: &str| targets("selector", text);
    let shown = |targets: &[ShrinkTarget]| {
        targets.iter().map(ToString::to_string).collect::<Vec<_>>().join(";")
    };
    for text in ["cpu:0", "gpu:0", "cpu:0;gpu:0", "gpu:3;cpu:0;gpu:1", "gpu:4294967295"] {
        assert_eq!(shown(&parse(text).expect("valid")), text);
    }
    for (text, entry, expected) in [
        ("", "", "with the number of a device"),
        ("cpu:0;", "", "with the number of a device"),
        ("cpu:0;;gpu:0", "", "with the number of a device"),
        ("cpu", "cpu", "with the number of a device"),
        ("cpu:0,gpu:0", "cpu:0,gpu:0", "with the number of a device"),
        ("tpu:0", "tpu:0", "cpu or gpu"),
        ("GPU:0", "GPU:0", "cpu or gpu"),
        (" gpu:0", " gpu:0", "cpu or gpu"),
        ("gpu:", "gpu:", "with the number of a device"),
        ("gpu:-1", "gpu:-1", "with the number of a device"),
        ("gpu:0x1", "gpu:0x1", "with the number of a device"),
        ("gpu:4294967296", "gpu:4294967296", "with the number of a device"),
        ("gpu:1;gpu:1", "gpu:1", "each once"),
        ("gpu:1;gpu:01", "gpu:01", "each once"),
    ] {
        let error = parse(text).expect_err(text).to_string();
        let expected = format!(
            "selector={text:?}: expected targets such as cpu:0;gpu:0: {entry:?} is not {expected}"
        );
        assert_eq!(error, expected);
    }
}

#[test]
fn names_are_one_to_one_in_each_dialect() {
    for dialect in [Dialect::Keys, Dialect::ArenaCfg, Dialect::Provider] {
        for key in ArenaKey::ALL {
            let name = key.name_in(dialect);
            assert!(name.is_none_or(|name| ArenaKey::named(name, dialect) == Some(key)), "{key}");
        }
    }
}
