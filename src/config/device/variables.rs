//! The parsers of the `LOWTIDE_DEVICE*` variables, for the table in `env`.

use crate::config::parse::{decay_time, part, positive, put, time_or_never, time_or_zero};
use crate::config::settings::Settings;

macro_rules! variables {
    ($($setting:ident: $parse:expr;)*) => {
        $(pub(in crate::config) fn $setting(
            settings: &mut Settings,
            text: &str,
        ) -> Result<(), String> {
            put(&mut settings.device.$setting, $parse(text))
        })*
    };
}

variables! {
    backend: str::parse;
    limit: positive;
    watermark: share;
    decay: decay_time;
    sleep_after: time_or_never;
    min_awake: time_or_zero;
    sleep_stable: str::parse;
    sleep_dynamic: str::parse;
}

/// Reads the device, or the list of devices.
pub(in crate::config) fn choice(settings: &mut Settings, text: &str) -> Result<(), String> {
    let (first, further) = super::list(text)?;
    settings.device.choice = Some(first);
    settings.device.further = Some(further);
    Ok(())
}

fn share(text: &str) -> Result<f64, &'static str> {
    let valid = part(text).filter(|share| (0.0..1.0).contains(share));
    valid.ok_or("a number in [0, 1), or a percentage below 100%")
}
