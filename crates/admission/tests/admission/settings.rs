//! The control loop without a service: settings that make no sense are refused before it begins,
//! and named; what one tick says, and in which order.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use lowtide_admission::ByteSize;
use lowtide_admission::clock::Moment;
use lowtide_admission::{
    Admission, Budget, Jobs, Ladder, Level, Limit, Maintenance, Resources, Sample, Sensor,
    Settings, SettingsError,
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
        let made = Maintenance::new(
            settings,
            sensor,
            Admission::new(),
            Resources::new(),
            Ladder::default(),
        );
        made.map(|_| ()).expect_err("refused")
    };
    let default = Settings::default();
    let error = refused(Settings { ceiling: f64::NAN, ..default });
    assert!(matches!(error, SettingsError::Part { name: "ceiling", .. }));
    let error = refused(Settings { active_tick: Duration::ZERO, ..default });
    assert_eq!(error, SettingsError::ZeroTime { name: "active_tick" });
    let error = refused(Settings { idle_tick: Duration::from_millis(1), ..default });
    assert!(matches!(error, SettingsError::Ticks { .. }));
    for correction_factor in [0.99, 5.01, f64::NAN] {
        let error = refused(Settings { correction_factor, ..default });
        assert!(
            matches!(error, SettingsError::CorrectionFactor { .. }),
            "{correction_factor}: {error}"
        );
    }
    for jitter in [-0.1, 0.51, f64::NAN] {
        let error = refused(Settings { jitter, ..default });
        assert!(matches!(error, SettingsError::Jitter { .. }), "{jitter}: {error}");
    }
    let error = refused(Settings { share: 0.0, ..default });
    assert!(matches!(error, SettingsError::Part { name: "share", .. }));
    assert!(Jobs::default().is_empty());
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
        let (settings, sensor, ladder) = (Settings::default(), Box::new(Full), Ladder::default());
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
