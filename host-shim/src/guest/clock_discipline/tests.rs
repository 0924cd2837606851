//! A host and a guest whose clocks are simulated, second by second.

use super::*;

const S: f64 = 1e9;
const DAY: u32 = 24 * 60 * 60;
/// How far the clocks may be apart.
const LIMIT_NS: f64 = 1e6;

/// A host, a guest, and the way between them.
struct Simulated {
    /// What the hardware of both counts, nanoseconds.
    raw: f64,
    /// What the host's NTP has added to that.
    gained: f64,
    /// The sum of the steps of the host's clock.
    steps: f64,
    /// The rate that the host's NTP sets, in 10^-9.
    host_ppb: f64,
    guest: f64,
    guest_drift_ppb: f64,
    guest_told_ppb: f64,
    /// Questions and answers take so long at least.
    way_ns: f64,
    noise: u64,
    asked: u32,
}

impl Simulated {
    fn new(host_ppb: f64, guest_drift_ppb: f64) -> Self {
        let raw = 1000.0 * S;
        let mut simulated = Self {
            raw,
            // Since its boot the host's clock was set by NTP.
            gained: 20.0 * S,
            steps: 1000.0 * S,
            host_ppb,
            guest: 0.0,
            guest_drift_ppb,
            guest_told_ppb: 0.0,
            way_ns: 50_000.0,
            noise: 1,
            asked: 0,
        };
        // StartSandbox.
        simulated.guest = simulated.wall();
        simulated.pass(2e6);
        simulated.guest -= 2e6;
        simulated
    }

    fn wall(&self) -> f64 {
        self.raw + self.gained + self.steps
    }

    fn pass(&mut self, ns: f64) {
        self.raw += ns;
        self.gained += ns * self.host_ppb / 1e9;
        self.guest += ns * (1.0 + self.guest_drift_ppb / 1e9) * (1.0 + self.guest_told_ppb / 1e9);
    }

    fn reading(&self) -> Reading {
        Reading {
            wall_ns: self.wall() as i64,
            monotonic_ns: (self.raw + self.gained) as i64,
            raw_ns: self.raw as i64,
        }
    }

    /// From 0 to 1, most often small.
    fn jitter(&mut self) -> f64 {
        self.noise = self.noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        ((self.noise >> 40) as f64 / f64::from(1 << 24)).powi(8)
    }

    /// The exchange of the least round trip of five. A way takes up to 5 ms longer, each by itself.
    fn measure(&mut self) -> Sample {
        let samples = (0..5).map(|_| {
            self.asked += 1;
            let asked = self.reading();
            let ways = [self.jitter(), self.jitter()].map(|jitter| self.way_ns + jitter * 5e6);
            self.pass(ways[0]);
            let guest_ns = self.guest as i64;
            self.pass(ways[1]);
            Sample::new(&asked, guest_ns, &self.reading())
        });
        samples.min_by_key(|sample| sample.round_trip_ns).unwrap()
    }

    fn correct(&mut self, discipline: &mut Discipline, host_was_set: bool) -> Correction {
        let sample = self.measure();
        let correction = discipline.correct(&sample, host_was_set, &self.reading());
        self.guest += correction.step_ns as f64;
        self.guest_told_ppb = f64::from(correction.rate_ppb);
        correction
    }

    fn off(&self) -> f64 {
        self.guest - self.wall()
    }

    /// Lets seconds pass, with `each` at each of them. Returns the largest offset and the number of steps.
    fn run(&mut self, seconds: u32, mut each: impl FnMut(&mut Self, u32)) -> (f64, u32) {
        let mut discipline = Discipline::new(&self.reading());
        // The guest starts.
        self.pass(0.2 * S);
        let mut stepped = u32::from(self.correct(&mut discipline, false).step_ns != 0);
        let (mut worst, mut asked_at) = (0.0_f64, self.raw);
        for second in 0..seconds {
            each(self, second);
            self.pass(S);
            worst = worst.max(self.off().abs());
            let has_diverged = second % 4 == 3 && discipline.observe(&self.reading());
            if has_diverged || self.raw - asked_at >= discipline.interval().as_secs_f64() * S {
                stepped += u32::from(self.correct(&mut discipline, false).step_ns != 0);
                asked_at = self.raw;
            }
        }
        (worst, stepped)
    }
}

#[test]
fn a_day_of_drift_stays_within_a_millisecond() {
    for (host_ppb, guest_ppb) in [(0.0, 50e3), (0.0, -50e3), (50e3, 0.0), (-200e3, 20e3), (0.0, 0.0)] {
        let mut simulated = Simulated::new(host_ppb, guest_ppb);
        let (worst, stepped) = simulated.run(DAY, |_, _| {});
        println!("host {host_ppb} ppb, guest {guest_ppb} ppb: {:.0} us at most", worst / 1e3);
        assert!(worst < LIMIT_NS, "{host_ppb} {guest_ppb}: {worst} ns");
        // The first correction alone.
        assert_eq!(stepped, 1);
    }
}

#[test]
fn a_guest_that_keeps_time_is_asked_once_a_minute() {
    let mut simulated = Simulated::new(10e3, 1e3);
    simulated.run(DAY, |_, _| {});
    let measured = simulated.asked / 5;
    assert!((DAY / 64..DAY / 60).contains(&measured), "{measured}");
}

#[test]
fn the_guest_follows_a_host_that_is_corrected() {
    // The host's NTP corrects by rate: small changes all the time, and one of a second at 500 and at 5000 ppm.
    let mut simulated = Simulated::new(0.0, 20e3);
    let (worst, stepped) = simulated.run(DAY / 4, |simulated, second| {
        simulated.host_ppb = match second {
            3000..5000 => 500e3,
            9000..9200 => -5000e3,
            _ => 15e3 * (f64::from(second) / 500.0).sin(),
        };
    });
    // A change is seen after 4 s. At 5000 ppm these are 20 ms.
    assert!(worst < 25e6, "{worst} ns");
    assert_eq!(stepped, 1);
    assert!(simulated.off().abs() < LIMIT_NS, "{}", simulated.off());
}

#[test]
fn a_change_of_the_hosts_rate_stays_within_a_millisecond() {
    let mut simulated = Simulated::new(0.0, 20e3);
    let change = |simulated: &mut Simulated, second: u32| {
        simulated.host_ppb = if (second / 1000).is_multiple_of(2) { 30e3 } else { -30e3 };
    };
    let (worst, _) = simulated.run(DAY, change);
    assert!(worst < LIMIT_NS, "{worst} ns");
}

#[test]
fn a_step_of_the_host_is_a_step_of_the_guest() {
    for step in [3600.0 * S, -3600.0 * S, 10e6, -10e6] {
        let mut simulated = Simulated::new(10e3, 30e3);
        let mut discipline = Discipline::new(&simulated.reading());
        simulated.correct(&mut discipline, false);
        simulated.pass(2.0 * S);
        simulated.steps += step;
        let correction = simulated.correct(&mut discipline, true);
        assert!((correction.step_ns as f64 - step).abs() < LIMIT_NS, "{step}: {correction:?}");
        assert!(simulated.off().abs() < LIMIT_NS, "{step}: {}", simulated.off());
    }
}

#[test]
fn a_small_offset_is_no_step() {
    for off in [100e6, -100e6] {
        let mut simulated = Simulated::new(0.0, 0.0);
        let mut discipline = Discipline::new(&simulated.reading());
        simulated.correct(&mut discipline, false);
        // A program of the guest has set its clock.
        simulated.guest += off;
        let mut intervals = 0;
        while simulated.off().abs() > LIMIT_NS {
            simulated.pass(discipline.interval().as_secs_f64() * S);
            let before = simulated.guest;
            assert_eq!(simulated.correct(&mut discipline, false).step_ns, 0);
            assert!(simulated.guest > before);
            intervals += 1;
            assert!(intervals < 1000, "{}", simulated.off());
        }
        simulated.guest += off * 2.0;
        simulated.pass(S);
        assert_ne!(simulated.correct(&mut discipline, false).step_ns, 0);
    }
}

#[test]
fn an_offset_that_may_be_none_is_not_corrected() {
    let sample = Sample { offset_ns: -3_000_000, round_trip_ns: 8_000_000 };
    let now = Reading { wall_ns: 1, monotonic_ns: 10_000_000_000, raw_ns: 10_000_000_000 };
    let correction = Discipline::new(&now).correct(&sample, true, &now);
    assert_eq!(correction, Correction { step_ns: 0, rate_ppb: 0 });
}

#[test]
fn any_answer_leads_to_a_correction_that_can_be_made() {
    let mut simulated = Simulated::new(10e3, 0.0);
    let mut discipline = Discipline::new(&simulated.reading());
    for round in 0..10_000 {
        let asked = simulated.reading();
        let answer = match round % 5 {
            0 => i64::MIN,
            1 => i64::MAX,
            2 => (simulated.jitter() * 1e18) as i64,
            3 => simulated.guest as i64 + 100_000_000,
            _ => 0,
        };
        simulated.pass(simulated.way_ns);
        let answered = simulated.reading();
        let sample = Sample::new(&asked, answer, &answered);
        let correction = discipline.correct(&sample, round % 3 == 0, &answered);
        assert!(f64::from(correction.rate_ppb.abs()) <= RATE_PPB);
        assert!((SHORTEST..=LONGEST).contains(&discipline.interval()));
        let seconds = simulated.jitter();
        simulated.pass(S * seconds);
    }
}

#[test]
fn slow_answers_and_a_large_offset_are_not_taken_for_drift() {
    let mut simulated = Simulated::new(0.0, 20e3);
    // As on an emulated host: 2 to 12 ms a round trip.
    simulated.way_ns = 1e6;
    simulated.guest += 20e6;
    let mut discipline = Discipline::new(&simulated.reading());
    for round in 0..200 {
        simulated.correct(&mut discipline, false);
        assert!((discipline.drift_ppb - 20e3).abs() < 150e3, "{round}: {}", discipline.drift_ppb);
        simulated.pass(discipline.interval().as_secs_f64() * S);
    }
    // A round trip, and no more.
    assert!(simulated.off().abs() < 2e6, "{}", simulated.off());
    assert_eq!(discipline.interval(), LONGEST);
}
