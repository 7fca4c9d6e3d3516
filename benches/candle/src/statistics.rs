//! Medians, and the interval that has the true one with a probability of 95 %.

/// Returns the median, or the upper one of two; NaN of no values.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Returns the narrowest pair of values, as far from either end, between which the true median is
/// with a probability of at least 95 %: how many values are below it follows the binomial
/// distribution of a fair coin. `None` if there are too few values (less than six).
pub(crate) fn interval(values: &mut [f64]) -> Option<(f64, f64)> {
    values.sort_by(f64::total_cmp);
    let mut outside = 0.0;
    let mut probability = 0.5_f64.powi(i32::try_from(values.len()).ok()?);
    let (mut first, mut left) = (None, f64::from(u32::try_from(values.len()).ok()?));
    for (number, (low, high)) in (1_u32..).zip(values.iter().zip(values.iter().rev())) {
        outside += 2.0 * probability;
        if outside > 0.05 || low > high {
            break;
        }
        first = Some((*low, *high));
        probability *= left / f64::from(number);
        left -= 1.0;
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_is_that_of_the_binomial_distribution() {
        let of = |count: u32| interval(&mut (1..=count).map(f64::from).collect::<Vec<_>>());
        // From tables of the sign test.
        assert_eq!(of(5), None);
        assert_eq!(of(6), Some((1.0, 6.0)));
        assert_eq!(of(12), Some((3.0, 10.0)));
        assert_eq!(of(20), Some((6.0, 15.0)));
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
    }
}
