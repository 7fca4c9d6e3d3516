//! The control loop without a service: settings that make no sense are refused before it begins,
//! and named; what one tick says, and in which order.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use lowtide_admission::ByteSize;
use lowtide_admission::clock::Moment;
use lowtide_admission::{
    Admission, Budget, Level, Limit, Maintenance, Resources, Sample, Sensor, Settings, Thresholds,
};

struct Nothing;

impl Sensor for Nothing {
    fn sample(&mut self, _: Moment) -> Sample {
        Sample::default()
    }
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let refused = |settings| {
        let sensor = Box::new(Nothing);
        let made =
            Maintenance::new(settings, sensor, Admission::new(), Resources::new(), Vec::new());
        made.map(|_| ()).expect_err("refused")
    };
    let default = Settings::default();
    let name = |settings| refused(settings).name;
    assert_eq!(name(Settings { ceiling: f64::NAN, ..default }), "ceiling");
    let error = refused(Settings { active_tick: Duration::ZERO, ..default });
    assert_eq!(error.to_string(), "active_tick is 0ns: expected a time above zero");
    let error = refused(Settings { idle_tick: Duration::from_millis(1), ..default });
    assert_eq!(error.to_string(), "active_tick is 10ms: expected at most the idle_tick of 1ms");
    for correction_factor in [0.99, 5.01, f64::NAN] {
        let error = refused(Settings { correction_factor, ..default });
        let value = format!("{correction_factor:?}");
        assert_eq!((error.name, error.value), ("correction_factor", value));
    }
    assert_eq!(name(Settings { share: 0.0, ..default }), "share");
}

#[test]
fn thresholds_that_make_no_sense_are_refused() {
    let good = Thresholds { up: [0.5, 0.6, 0.7], down: [0.4, 0.5, 0.6], ..Thresholds::default() };
    let made = |thresholds| {
        let settings = Settings { thresholds, ..Settings::default() };
        let (admission, resources) = (Admission::new(), Resources::new());
        let policy = Vec::new();
        Maintenance::new(settings, Box::new(Nothing), admission, resources, policy).map(|_| ())
    };
    assert_eq!(made(good), Ok(()));
    for (up, down) in [
        ([f64::NAN, 0.6, 0.7], good.down),
        ([0.5, 0.6, 1.1], good.down),
        (good.up, [0.0, 0.5, 0.6]),
        (good.up, [0.4, 0.6, 0.65]),
        ([0.5, 0.5, 0.7], [0.4, 0.45, 0.6]),
    ] {
        let error = made(Thresholds { up, down, ..good }).expect_err("refused");
        assert_eq!((error.name, error.value), ("thresholds", format!("{:?}", (up, down))));
    }
}

/// At its limit, nearly.
struct Full;

impl Sensor for Full {
    fn sample(&mut self, _: Moment) -> Sample {
        let (physical, limit) = (ByteSize::mib(99), Limit::given(ByteSize::mib(100)));
        Sample { physical, limit, ..Sample::default() }
    }
}

/// The bug: a level was told to everybody before requests were shed by it.
#[test]
fn a_level_that_is_seen_is_in_force() {
    for round in 0..300 {
        let (admission, resources) = (Admission::new(), Resources::new());
        let (settings, sensor, ladder) = (Settings::default(), Box::new(Full), Vec::new());
        let mut maintenance =
            Maintenance::new(settings, sensor, admission.clone(), resources, ladder)
                .expect("settings");
        let (state, ready) = (maintenance.state(), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                ready.store(true, Ordering::Release);
                while state.level(Budget::Host) == Level::None {
                    std::hint::spin_loop();
                }
                assert_eq!(admission.level(), Level::Critical, "round {round}");
            });
            while !ready.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
            let _ = maintenance.tick(Moment::ORIGIN);
        });
    }
}
