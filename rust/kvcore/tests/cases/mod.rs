//! How many cases a property test runs.

use proptest::test_runner::Config;

/// The test's own number of cases, or what `PROPTEST_CASES` says: few under an emulator, many in a long search.
pub fn cases(own: u32) -> Config {
    let default = Config { failure_persistence: None, ..Config::default() };
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => default, // proptest has read the variable
        None => Config { cases: own, ..default },
    }
}

/// Whether `PROPTEST_CASES` asks for so few cases that sweeps over all formats take a few of them, too: under an emulator.
#[allow(dead_code, reason = "not every test sweeps")]
pub fn few() -> bool {
    std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse::<u32>().ok()).is_some_and(|n| n < 8)
}
