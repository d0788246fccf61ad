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
