//! The stand-in for `device` in a build without that feature: it has no settings of device arenas.

/// The parsers of the `LOWTIDE_DEVICE*` variables. They ignore the value; the start of a `Memory`
/// reports the variables.
pub(super) mod variables {
    use crate::config::Settings;

    macro_rules! variables {
        ($($setting:ident)*) => {
            $(pub(in crate::config) const fn $setting(
                _: &mut Settings,
                _: &str,
            ) -> Result<(), String> {
                Ok(())
            })*
        };
    }

    variables! {
        choice backend limit watermark decay sleep_after min_awake sleep_stable sleep_dynamic
    }
}
