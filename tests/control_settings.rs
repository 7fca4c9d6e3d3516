//! Settings of the control loop that make no sense are refused before it begins, and named.

use std::time::Duration;

use lowtide::clock::Moment;
use lowtide::control::{
    Admission, Jobs, Ladder, Maintenance, Resources, Sample, Sensor, Settings, SettingsError,
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
    for multiplier in [0.99, 5.01, f64::NAN] {
        let error = refused(Settings { multiplier, ..default });
        assert!(matches!(error, SettingsError::Multiplier { .. }), "{multiplier}: {error}");
    }
    for jitter in [-0.1, 0.51, f64::NAN] {
        let error = refused(Settings { jitter, ..default });
        assert!(matches!(error, SettingsError::Jitter { .. }), "{jitter}: {error}");
    }
    let error = refused(Settings { share: 0.0, ..default });
    assert!(matches!(error, SettingsError::Part { name: "share", .. }));
    assert!(Jobs::default().is_empty());
}
