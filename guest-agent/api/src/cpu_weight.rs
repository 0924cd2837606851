//! The weight of a cgroup.

/// The weight of cgroup v2 for the shares of v1, as runc computes it from 1.3.2 on: the least, the default and the
/// greatest shares (2, 1024, 262144) are the least, the default and the greatest weight (1, 100, 10000).
#[must_use]
pub fn weight_of_shares(shares: u64) -> u64 {
    match shares {
        ..=2 => 1,
        262_144.. => 10_000,
        _ => {
            let log = (shares as f64).log2();
            10_f64.powf((log * log + 125.0 * log) / 612.0 - 7.0 / 34.0).ceil() as u64
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_span_the_weights() {
        let expected = [(1, 1), (2, 1), (512, 59), (1024, 100), (262_144, 10_000), (u64::MAX, 10_000)];
        for (shares, weight) in expected {
            assert_eq!(weight_of_shares(shares), weight, "of {shares}");
        }
    }
}
